"""A ring whose requests have times, for what is computed from them."""

from typing import Any

from quadriga.client.types import Completion, Timings
from quadriga.clock import now
from quadriga.wire.client import Usage
from tests.unit.scripted_ring import ScriptedRing

INFO = {"page_size": 16, "pages_total": 64, "chunked_prefill_size": 128, "device": "cpu"}
NUM_TOKENS = 5


def completion(received_at: float, num_tokens: int = NUM_TOKENS) -> Completion:
    """Return a choice that has waited for a second, and has had a token every 10 ms."""
    admitted_at = received_at + 1
    token_times = [admitted_at + 0.01 * (number + 1) for number in range(num_tokens)]
    times = Timings(
        received_at, received_at, received_at, admitted_at, token_times[0], token_times[-1],
        token_times[-1], token_times,
    )  # fmt: skip
    return Completion("r", "", [], "stop", Usage(32, num_tokens, 16), times)


class MeasuredRing(ScriptedRing):
    """A ring whose requests have times."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(["a"], **INFO, **facts)

    def completion(self) -> Completion:
        return completion(now() - 2)
