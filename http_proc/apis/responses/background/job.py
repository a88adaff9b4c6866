"""What is kept of a response in the background until it ends, so that it can be made again."""

from typing import Any

import msgspec

from http_proc.apis.responses.plan import ResponsePlan
from http_proc.apis.responses.store import Items
from http_proc.caller import Caller, current_caller
from http_proc.gateway import ResponseHead
from http_proc.resumption import new_key


class BackgroundJob(msgspec.Struct, kw_only=True):
    """The request of a response.

    Attributes:
        key: as in Resumption: of it come the seed and the ids of calls, so that each attempt has
            the same events.
        body: of the request, with the items that its references point to.
        history: the items that come before its input.
        tenant, has_users, user, key_hash: of the Caller.
    """

    id: str
    key: str
    created: int
    model: str
    body: dict[str, Any]
    history: Items
    tenant: str
    has_users: bool
    user: str
    key_hash: str

    @property
    def head(self) -> ResponseHead:
        """The head of the response."""
        return ResponseHead(self.id, self.created, self.model)

    @property
    def caller(self) -> Caller:
        """The tenant of the request."""
        return Caller(self.tenant, self.has_users, self.user, key_hash=self.key_hash)


def new_job(plan: ResponsePlan, body: dict[str, Any], head: ResponseHead) -> BackgroundJob:
    """Return the job of a request that was checked."""
    caller = current_caller()
    return BackgroundJob(
        id=head.id,
        key=new_key(),
        created=head.created,
        model=head.model,
        body={**body, "input": plan.given},
        history=plan.history,
        tenant=caller.tenant,
        has_users=caller.has_users,
        user=caller.user,
        key_hash=caller.key_hash,
    )
