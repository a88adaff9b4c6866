"""Quotas of tenants: open requests, requests and tokens a minute.

They hold for all gateways and clients together, since all requests pass the frontend. The windows
are in its memory: a frontend that is restarted begins with empty ones.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from quadriga.errors import InvalidRequest, QueueFull
from quadriga.tenants.tenant import Tenant
from tokenizer_proc.overload import RETRY_AFTER_S

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
        """Raise QueueFull for a request that is too much now.

        Its `retry_after` is exact for the limits a minute: the request is accepted then, unless
        the tenant has sent others meanwhile.

        Raises:
            QueueFull: a limit of the tenant is reached.
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
        """Raise QueueFull where a tenant has as many open requests as it may have."""
        usage = self._of(tenant.name)
        if tenant.max_open_requests is not None and usage.num_open >= tenant.max_open_requests:
            raise QueueFull(
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
    raise QueueFull(
        f"tenant {tenant.name} has used {total} {what} in the last {WINDOW_S:g} s and its"
        f" {what}_per_minute is {limit}; try again in {wait_s:g} s",
        wait_s,
    )
