"""What the requests that ended lately say about the ones that run and wait."""

from bisect import bisect_left
from collections import Counter, deque

from scheduler_proc.state.request import FinishReason, Request

NUM_RECENT_ENDS = 64


class RecentEnds:
    """The lengths of the last answers, and the shares of their prompts that were cached."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, bool]] = deque(maxlen=NUM_RECENT_ENDS)
        self._prompts: deque[tuple[int, int]] = deque(maxlen=NUM_RECENT_ENDS)
        self._curve: list[tuple[int, float]] | None = None

    def on_end(self, request: Request) -> None:
        """Take in the end of a request that was admitted."""
        is_stop = request.finish_reason is FinishReason.STOP
        if request.can_stop:
            self._lengths.append((request.num_generated, is_stop))
        self._prompts.append((request.num_prompt, request.cached_tokens))
        self._curve = None

    @property
    def uncached_share(self) -> float:
        """The share of the prompts' tokens that were computed; 1.0 without recent ends."""
        num_tokens = sum(num_prompt for num_prompt, _ in self._prompts)
        return 1 - sum(cached for _, cached in self._prompts) / num_tokens if num_tokens else 1.0

    def length(self, num_generated: int, limit: int, share: float) -> int:
        """Return a length below which this share of the answers stays that can stop, like one.

        Args:
            num_generated: tokens that the answer has.
            limit: its largest length.
            share: 0 to 1.
        """
        curve = self.curve
        first = bisect_left(curve, (num_generated + 1, 0.0))
        reached = curve[first - 1][1] if first else 1.0
        wanted = (1 - share) * reached
        place = bisect_left(curve, -wanted, lo=first, key=lambda point: -point[1])
        return min(limit, curve[place][0]) if place < len(curve) else limit

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Lengths at which answers stopped, each with the share of answers that is longer.

        Answers that ended for another reason, such as their limit, would have gone on: they count
        up to there only (Kaplan and Meier, 1958).
        """
        if self._curve is None:
            self._curve = _survival(list(self._lengths))
        return self._curve


def _survival(lengths: list[tuple[int, bool]]) -> list[tuple[int, float]]:
    stops = Counter(length for length, is_stop in lengths if is_stop)
    ends = Counter(length for length, _ in lengths)
    num_left, share, curve = len(lengths), 1.0, []
    for length in sorted(ends):
        if stops[length]:
            share *= 1 - stops[length] / num_left
            curve.append((length, share))
        num_left -= ends[length]
    return curve
