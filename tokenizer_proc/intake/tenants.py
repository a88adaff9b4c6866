"""Tenants at the frontend: the owner of each request, its quotas, and what is counted for it.

`RequestOwners` finds the tenant of a request, `Quotas` enforces open requests, requests and tokens
a minute, and `TenantAccounts` checks and counts each request.
"""

import hashlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from quadriga.errors import InvalidRequest, QuotaExceeded
from quadriga.server.config import engine_args, frontend_args
from quadriga.server.tenants import MIN_PRIORITY, Tenant, TenantFile, own_info, parent_name
from quadriga.wire.client import Generate, Info, is_gateway
from quadriga.wire.sockets import encode
from tokenizer_proc.intake.overload import RETRY_AFTER_S
from tokenizer_proc.preparation.prepare import Prepared
from tokenizer_proc.replicas.placed import PlacedRequest

DEFAULT_MODEL = engine_args.ModelArgs()
NUM_SHOWN_CHARS = 12

_decode_info = msgspec.msgpack.Decoder(Info).decode


class Owner(NamedTuple):
    """The tenant of a request.

    Attributes:
        name: the tenant's name, with its user where there is one; "" without tenants.
        tenant: its weight and limits; None where it has none of its own.
    """

    name: str = ""
    tenant: Tenant | None = None

    @property
    def weight(self) -> float:
        """Its share of the server."""
        return 1.0 if self.tenant is None else self.tenant.weight

    @property
    def cache_salt(self) -> str:
        """What its cached prefixes are kept apart by; "" where it shares them."""
        is_apart = self.tenant is not None and self.tenant.cache == "own"
        return self.tenant.name if self.tenant is not None and is_apart else ""

    def salted(self, salt: str) -> str:
        """Return what a request's cached prefixes are kept apart by. `salt`: its own, or ""."""
        return f"{self.cache_salt}\0{salt}" if salt else self.cache_salt


class RequestOwners:
    """Find the tenants of requests.

    A gateway has checked the API key of a request and names its tenant. A client with a CURVE key
    is the tenant whose entry names that key. Any other client is a tenant of its own.

    Args:
        args: the flags of tenants.
        model: the flags of the model that is served.
        key_names: names of the CURVE keys of clients by their addresses, "" for the server's own;
            None where the socket has no keys.
        directory: as of TenantFile.
    """

    def __init__(
        self,
        args: frontend_args.TenantArgs,
        model: engine_args.ModelArgs = DEFAULT_MODEL,
        key_names: MutableMapping[bytes, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._file = TenantFile(Path(args.keys), directory=directory) if args.keys else None
        self._has_tenants = args.has_tenants
        self._model = model
        self._key_names = key_names

    def forget(self, client: bytes) -> None:
        """Forget a client that is gone."""
        if self._key_names is not None:
            self._key_names.pop(client, None)

    def check_operator(self, client: bytes, what: str) -> None:
        """Raise InvalidRequest where a client may not do what concerns all tenants.

        Args:
            client: its ZMQ identity.
            what: the beginning of the reason, to which "all of them" is added.
        """
        if self._file is not None and not self._is_gateway(client):
            raise InvalidRequest(
                f"this server has tenants, and {what} all of them: ask the web gateway, with a key"
                " of --api-key"
            )

    def visible(self, client: bytes, payload: bytes) -> bytes:
        """Return the answer to a question as its client may see it.

        With a key file the server's info shows a client of its own only what is its tenant's.
        """
        if self._file is None or self._is_gateway(client):
            return payload
        try:
            info = _decode_info(payload)
        except msgspec.ValidationError:  # an answer to another question
            return payload
        return encode(Info(info.request_id, own_info(info.values, self.owner(client, "").name)))

    def owner(self, client: bytes, named: str) -> Owner:
        """Return the tenant of a request. `named`: Generate.tenant.

        Raises:
            InvalidRequest: the gateway names a tenant that the file has no more.
        """
        if not self._has_tenants:
            return Owner()
        if self._file is not None and self._file.has_changed():
            self._file.reload_in_thread()
        if self._is_gateway(client):
            return self._named(named)
        key_name = None if self._key_names is None else self._key_names.get(client)
        if self._file is not None and key_name:
            tenant = self._file.index.by_curve.get(key_name)
            if tenant is not None:
                return Owner(tenant.name, tenant)
        # The address itself is a secret of its client.
        return Owner("client-" + hashlib.sha256(client).hexdigest()[:NUM_SHOWN_CHARS])

    def _is_gateway(self, client: bytes) -> bool:
        has_key = self._key_names is None or self._key_names.get(client) == ""
        return is_gateway(client) and has_key

    def _named(self, name: str) -> Owner:
        if self._file is None or not name:
            return Owner(name)
        tenant = self._file.index.named(name)
        if tenant is None:  # the gateway may have read a new file before this process
            self._file.reload(settles=False)
            tenant = self._file.index.named(name)
        if tenant is None:
            raise InvalidRequest(f"there is no tenant {name!r} any more: use another API key")
        return Owner(name, tenant)

    def _may_use(self, tenant: Tenant, adapter: str) -> bool:
        """Return whether a tenant's models are the model, or its adapter if one is named."""
        if adapter:
            return adapter in tenant.models
        return any(map(self._model.is_called, tenant.models))

    def checked(self, message: Generate, owner: Owner) -> Generate:
        """Return a request with a priority that its tenant may use.

        The default priority, 0, becomes the nearest one that is allowed. The lowest one, which
        lines of batches have, is allowed to all.

        Raises:
            InvalidRequest: the tenant may not use this priority, or not the model.
        """
        tenant = owner.tenant
        if tenant is None:
            return message
        if tenant.models and not self._may_use(tenant, message.adapter):
            name, models = message.adapter or self._model.shown_name, ", ".join(tenant.models)
            raise InvalidRequest(
                f"model is {name!r}, and tenant {tenant.name} may use {models}: ask the server's"
                " operator",
                "model",
            )
        if message.priority == MIN_PRIORITY:
            return message
        smallest, largest = tenant.priority
        if message.priority and not smallest <= message.priority <= largest:
            raise InvalidRequest(
                f"priority is {message.priority}: tenant {tenant.name} may use {smallest} to"
                f" {largest}",
                "priority",
            )
        priority = min(max(message.priority, smallest), largest)
        if priority == message.priority:
            return message
        return msgspec.structs.replace(message, priority=priority)


# Quotas of tenants: open requests, requests and tokens a minute.
#
# They hold for all gateways and clients together, since all requests pass the frontend. The
# windows are in its memory: a frontend that is restarted begins with empty ones.

WINDOW_S = 60.0
ROUNDING_S = 1e-6


class MinuteWindow:
    """The sum of what was counted in the last WINDOW_S."""

    def __init__(self) -> None:
        self._counted: deque[tuple[float, int]] = deque()
        self._total = 0

    def total(self, now: float) -> int:
        """Return the sum at a time, which is not before that of an earlier call."""
        while self._counted and now - self._counted[0][0] >= WINDOW_S - ROUNDING_S:
            self._total -= self._counted.popleft()[1]
        return self._total

    def add(self, now: float, count: int) -> None:
        """Count something."""
        if count:
            self._counted.append((now, count))
            self._total += count

    def wait_s(self, now: float, excess: int) -> float:
        """Return the seconds until at least `excess` has left the window, in whole ms."""
        for counted_at, count in self._counted:
            excess -= count
            if excess <= 0:
                return max(0.001, math.ceil((counted_at + WINDOW_S - now) * 1000) / 1000)
        return WINDOW_S


class TenantUsage:
    """What one tenant uses now, and has used in the last minute.

    Attributes:
        has_token_limit: `tokens` is kept.
    """

    __slots__ = ("has_token_limit", "num_open", "requests", "tokens")

    def __init__(self) -> None:
        self.num_open = 0
        self.has_token_limit = False
        self.requests = MinuteWindow()
        self.tokens = MinuteWindow()


class Quotas:
    """Enforce the limits of tenants on new requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, TenantUsage] = {}

    def _of(self, name: str) -> TenantUsage:
        usage = self._usage.get(name)
        if usage is None:
            usage = self._usage[name] = TenantUsage()
        return usage

    def check(self, tenant: Tenant, num_prompt_tokens: int, is_open: bool = False) -> None:
        """Raise QuotaExceeded for a request that is too much now.

        Its `retry_after` is exact for the limits a minute: the request is accepted then, unless
        the tenant has sent others meanwhile.

        Raises:
            QuotaExceeded: a limit of the tenant is reached.
            InvalidRequest: the prompt alone has more tokens than the tenant may use in a minute.
        """
        if not is_open:
            self.check_open(tenant)
        usage, now = self._of(tenant.name), self._clock()
        if tenant.requests_per_minute is not None:
            _check(tenant, "requests", usage.requests, now, tenant.requests_per_minute, 1)
        limit = tenant.tokens_per_minute
        usage.has_token_limit = limit is not None
        if limit is None:
            return
        if num_prompt_tokens > limit:
            raise InvalidRequest(
                f"prompt has {num_prompt_tokens} tokens, and tokens_per_minute of tenant"
                f" {tenant.name} is {limit}; shorten it",
                "prompt",
            )
        _check(tenant, "tokens", usage.tokens, now, limit, num_prompt_tokens)

    def check_open(self, tenant: Tenant) -> None:
        """Raise QuotaExceeded where a tenant has as many open requests as it may have."""
        usage = self._of(tenant.name)
        if tenant.max_open_requests is not None and usage.num_open >= tenant.max_open_requests:
            raise QuotaExceeded(
                f"tenant {tenant.name} has {usage.num_open} open requests and its max_open_requests"
                f" is {tenant.max_open_requests}; wait until one has ended, or try again in"
                f" {RETRY_AFTER_S:g} s",
                RETRY_AFTER_S,
            )

    def count_accepted(self, tenant: Tenant, num_prompt_tokens: int) -> None:
        """Count a new request that was accepted, and the tokens of its prompt."""
        usage, now = self._of(tenant.name), self._clock()
        if tenant.requests_per_minute is not None:
            usage.requests.add(now, 1)
        if tenant.tokens_per_minute is not None:
            usage.tokens.add(now, num_prompt_tokens)

    def count_opened(self, tenant: Tenant) -> None:
        """Count a request of a tenant as open."""
        self._of(tenant.name).num_open += 1

    def count_closed(self, name: str) -> None:
        """Count a request of a tenant as ended."""
        usage = self._usage.get(name)
        if usage is not None:
            usage.num_open -= 1

    def count_generated(self, name: str, num_tokens: int) -> None:
        """Count the tokens that a choice of a request of a tenant has generated, at its end."""
        usage = self._usage.get(name)
        if usage is not None and usage.has_token_limit:
            usage.tokens.add(self._clock(), num_tokens)


def _check(
    tenant: Tenant, what: str, window: MinuteWindow, now: float, limit: int, count: int
) -> None:
    total = window.total(now)
    if total + count <= limit:
        return
    wait_s = window.wait_s(now, total + count - limit)
    raise QuotaExceeded(
        f"tenant {tenant.name} has used {total} {what} in the last {WINDOW_S:g} s and its"
        f" {what}_per_minute is {limit}; try again in {wait_s:g} s",
        wait_s,
    )


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
            QuotaExceeded: a limit of the tenant is reached.
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

    def on_choice_ended(self, request: PlacedRequest, num_generated: int) -> None:
        """Count the tokens of a choice that has ended, and the request with its last choice."""
        submit = request.submit
        if submit is None or not submit.tenant:
            return
        counted = self._counted.get((submit.client, submit.request_id))
        if counted is None or counted.num_unended > 0:  # else its end was only sent again
            self._quotas.count_generated(parent_name(submit.tenant), num_generated)
        if counted is not None:
            counted.num_unended -= 1
        if request.has_ended:
            self._quotas.count_closed(parent_name(submit.tenant))

    def on_lost_choice_ended(self, client: bytes, request_id: str, num_generated: int) -> None:
        """Count the tokens of a choice that was aborted as its client's connection was lost."""
        counted = self._counted.get((client, request_id))
        if counted is not None:
            self._quotas.count_generated(counted.tenant, num_generated)

    def on_lost(self, requests: list[PlacedRequest]) -> None:
        """Count the requests of a client that is gone as ended."""
        for request in requests:
            if request.submit is not None:
                self._quotas.count_closed(parent_name(request.submit.tenant))
