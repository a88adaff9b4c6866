"""What the frontend does for tenants with a request: find its owner, check and count its use."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from quadriga.tenants.tenant import Tenant, parent_name
from quadriga.wire.messages.from_client import Generate
from tokenizer_proc.open_requests import OpenRequest
from tokenizer_proc.preparation.prepare import Prepared
from tokenizer_proc.quotas import Quotas
from tokenizer_proc.tenants import Owner, RequestOwners

# Requests that were counted are remembered up to this number, so that one whose client lost its
# connection is not counted twice.
MAX_COUNTED = 65536
# So often a request may come back for nothing: each time it may be computed from its first token.
MAX_FREE_RETURNS = 3


class AdmittedMessage(NamedTuple):
    """A request as its tenant may send it, and its owner."""

    message: Generate
    owner: Owner


@dataclass(slots=True)
class CountedRequest:
    """A request that counts in the quotas of its tenant.

    Attributes:
        digest: as in Prepared: a request of the same id that asks for something else is another.
        seed: of its first choice: its answer is the same where it comes back without one.
        tenant: name of the tenant.
        num_unended: choices whose generated tokens are not counted yet.
        num_returns: how often its client has sent it again.
    """

    digest: bytes
    seed: int | None
    tenant: str
    num_unended: int
    num_returns: int = 0


class TenantAccounts:
    """Enforce the limits of tenants, and count what their requests use.

    Args:
        owners: finds the tenants of requests.
    """

    def __init__(self, owners: RequestOwners) -> None:
        self._owners = owners
        self._quotas = Quotas()
        self._counted: OrderedDict[tuple[bytes, str], CountedRequest] = OrderedDict()

    def has_limits(self, client: bytes, named: str) -> bool:
        """Return whether the tenant of a request may have limits. named: Generate.tenant."""
        return self._owners.owner(client, named).tenant is not None

    def admit(
        self, client: bytes, prepared: Prepared, resent: bool, is_open: bool, is_proven: bool
    ) -> AdmittedMessage:
        """Return a request with its owner, which counts against the limits of its tenant.

        One that is sent again counts once, whatever became of the connection, as long as it asks
        for the same.

        Args:
            client: its address.
            prepared: the request.
            resent: its client has sent it before.
            is_open: the request is open.
            is_proven: a frontend before this one has accepted the request, as the scheduler says.

        Raises:
            InvalidRequest: the tenant may not send this request.
            QueueFull: a limit of the tenant is reached.
        """
        message = prepared.request
        owner = self._owners.owner(client, message.tenant)
        message = self._owners.checked(message, owner)
        if owner.tenant is None or (is_open and not resent):  # such a one is passed over
            return AdmittedMessage(message, owner)
        name = (client, message.request_id)
        counted = self._counted.get(name)
        is_same = resent and counted is not None and counted.digest == prepared.digest
        if is_same and counted is not None and counted.num_returns < MAX_FREE_RETURNS:
            if not is_open:
                self._quotas.check_open(owner.tenant)
                counted.num_returns += 1
            params = msgspec.structs.replace(message.params, seed=counted.seed)
            return AdmittedMessage(msgspec.structs.replace(message, params=params), owner)
        if not is_proven:
            self._count(owner.tenant, message, is_open)
        params = message.params
        self._counted[name] = CountedRequest(
            prepared.digest, params.seed, owner.tenant.name, params.n
        )
        self._counted.move_to_end(name)
        while len(self._counted) > MAX_COUNTED:
            self._counted.popitem(last=False)
        return AdmittedMessage(message, owner)

    def _count(self, tenant: Tenant, message: Generate, is_open: bool) -> None:
        num_prompt_tokens = len(message.prompt_token_ids or b"") // 4
        self._quotas.check(tenant, num_prompt_tokens, is_open)
        self._quotas.count_accepted(tenant, num_prompt_tokens)

    def forget(self, client: bytes, request_id: str) -> None:
        """Take in that a client has aborted a request: it counts again if it is sent again."""
        self._counted.pop((client, request_id), None)

    def on_opened(self, owner: Owner) -> None:
        """Count a request that the scheduler was sent for the first time."""
        if owner.tenant is not None:
            self._quotas.count_opened(owner.tenant)

    def on_choice_ended(self, request: OpenRequest, num_generated: int) -> None:
        """Count the tokens of a choice that has ended, and the request with its last choice."""
        submit = request.submit
        if not submit.tenant:
            return
        counted = self._counted.get((submit.client, submit.request_id))
        if counted is None or counted.num_unended > 0:  # else its end was only sent again
            self._quotas.count_generated(parent_name(submit.tenant), num_generated)
        if counted is not None:
            counted.num_unended -= 1
        if request.num_open_choices <= 0:
            self._quotas.count_closed(parent_name(submit.tenant))

    def on_lost_choice_ended(self, client: bytes, request_id: str, num_generated: int) -> None:
        """Count the tokens of a choice that was aborted as its client's connection was lost."""
        counted = self._counted.get((client, request_id))
        if counted is not None:
            self._quotas.count_generated(counted.tenant, num_generated)

    def on_lost(self, requests: list[OpenRequest]) -> None:
        """Count the requests of a client that is gone as ended."""
        for request in requests:
            self._quotas.count_closed(parent_name(request.submit.tenant))
