"""What the requests of this gateway took: counted here, shown by metrics.py."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate, pairwise

from quadriga.completion import Completion

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts by upper bounds. Cheap enough for every token of every request."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were not above it), as Prometheus wants them: cumulative."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class RequestMetrics:
    """What the requests of this gateway took, stage by stage."""

    def __init__(self) -> None:
        self.slow_readers = 0
        self.errors: Counter[str] = Counter()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_latency_seconds": Histogram(SECONDS),
            "e2e_request_latency_seconds": Histogram(SECONDS),
            "request_tokenize_time_seconds": Histogram(SECONDS),
            "request_queue_time_seconds": Histogram(SECONDS),
            "request_prefill_time_seconds": Histogram(SECONDS),
            "request_decode_time_seconds": Histogram(SECONDS),
            "request_delivery_time_seconds": Histogram(SECONDS),
            "request_prompt_tokens": Histogram(TOKENS),
            "request_generation_tokens": Histogram(TOKENS),
        }

    def count_error(self, code: str) -> None:
        self.errors[code] += 1

    def count(self, completion: Completion) -> None:
        """A request has ended."""
        times, usage, histograms = completion.timings, completion.usage, self.histograms
        histograms["e2e_request_latency_seconds"].observe(times.delivered - times.submitted)
        histograms["request_prompt_tokens"].observe(usage.prompt_tokens)
        histograms["request_generation_tokens"].observe(usage.completion_tokens)
        histograms["request_tokenize_time_seconds"].observe(times.tokenized - times.received)
        if not times.token_times:
            return
        first, last = times.token_times[0], times.token_times[-1]
        histograms["time_to_first_token_seconds"].observe(first - times.submitted)
        histograms["request_queue_time_seconds"].observe(times.admitted - times.tokenized)
        histograms["request_prefill_time_seconds"].observe(first - times.admitted)
        histograms["request_decode_time_seconds"].observe(last - first)
        histograms["request_delivery_time_seconds"].observe(times.delivered - last)
        gaps = histograms["inter_token_latency_seconds"]
        for earlier, later in pairwise(times.token_times):
            gaps.observe(later - earlier)
