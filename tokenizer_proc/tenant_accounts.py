"""What the frontend does for tenants with a request: find its owner, check and count its use."""

from typing import NamedTuple

from quadriga.tenants.tenant import parent_name
from quadriga.wire.messages.from_client import Generate
from tokenizer_proc.open_requests import OpenRequest
from tokenizer_proc.quotas import Quotas
from tokenizer_proc.tenants import Owner, RequestOwners


class AdmittedMessage(NamedTuple):
    """A request as its tenant may send it, and its owner."""

    message: Generate
    owner: Owner


class TenantAccounts:
    """Enforce the limits of tenants, and count what their requests use.

    Args:
        owners: finds the tenants of requests.
    """

    def __init__(self, owners: RequestOwners) -> None:
        self._owners = owners
        self._quotas = Quotas()

    def admit(
        self, client: bytes, message: Generate, num_prompt_tokens: int, is_new: bool
    ) -> AdmittedMessage:
        """Return a request with its owner; a new one counts against the limits of its tenant.

        Raises:
            InvalidRequest: the tenant may not send this request.
            QueueFull: a limit of the tenant is reached.
        """
        owner = self._owners.owner(client, message.tenant)
        message = self._owners.checked(message, owner)
        if owner.tenant is not None and is_new:
            self._quotas.check(owner.tenant, num_prompt_tokens)
            self._quotas.count_accepted(owner.tenant, num_prompt_tokens)
        return AdmittedMessage(message, owner)

    def on_opened(self, owner: Owner) -> None:
        """Count a request that the scheduler was sent for the first time."""
        if owner.tenant is not None:
            self._quotas.count_opened(owner.tenant)

    def on_choice_ended(self, request: OpenRequest, num_generated: int) -> None:
        """Count the tokens of a choice that has ended, and the request with its last choice."""
        if request.submit.tenant:
            name = parent_name(request.submit.tenant)
            self._quotas.count_generated(name, num_generated)
            if request.num_open_choices <= 0:
                self._quotas.count_closed(name)

    def on_lost(self, requests: list[OpenRequest]) -> None:
        """Count the requests of a client that is gone as ended."""
        for request in requests:
            self._quotas.count_closed(parent_name(request.submit.tenant))
