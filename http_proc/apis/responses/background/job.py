"""What is kept of a response in the background until it ends, so that it can be made again."""

import secrets
from typing import Any

import msgspec

from http_proc.apis.responses.plan import ResponsePlan
from http_proc.apis.responses.store import Items
from http_proc.caller import Caller, current_caller
from http_proc.gateway import ResponseHead

SEED_BITS = 31


class BackgroundJob(msgspec.Struct, kw_only=True):
    """The request of a response.

    Attributes:
        body: of the request, with the items that its references point to, and with a seed: each
            attempt has the same text.
        history: the items that come before its input.
        tenant, has_users, user, key_hash: of the Caller.
    """

    id: str
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
        return Caller(self.tenant, self.has_users, self.user, self.key_hash)


def new_job(plan: ResponsePlan, body: dict[str, Any], head: ResponseHead) -> BackgroundJob:
    """Return the job of a request that was checked."""
    body = {**body, "input": plan.given}
    if plan.params.seed is None:
        body["seed"] = secrets.randbits(SEED_BITS)
    caller = current_caller()
    return BackgroundJob(
        id=head.id,
        created=head.created,
        model=head.model,
        body=body,
        history=plan.history,
        tenant=caller.tenant,
        has_users=caller.has_users,
        user=caller.user,
        key_hash=caller.key_hash,
    )
