"""Counters and histograms of the requests that came by HTTP, shown at GET /metrics."""

from collections import Counter
from itertools import pairwise

from quadriga.client.types import Completion
from quadriga.histogram import SECONDS, Histogram
from quadriga.sampling.params import SamplingParams

TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
CHOICE_BOUNDS = (1, 2, 5, 10, 20, 50, 128)

# Metric name -> (bounds of the buckets, help text).
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (SECONDS, "Seconds from submission to the first token"),
    "request_time_per_output_token_seconds": (
        SECONDS,
        "Mean seconds for each token of a choice after the first",
    ),
    "inter_token_latency_seconds": (SECONDS, "Seconds between two tokens"),
    "e2e_request_latency_seconds": (SECONDS, "Seconds from submission to delivery"),
    "request_tokenize_time_seconds": (SECONDS, "Seconds in the tokenizer"),
    "request_queue_time_seconds": (SECONDS, "Seconds in the waiting queue"),
    "request_prefill_time_seconds": (SECONDS, "Seconds from admission to the first token"),
    "request_decode_time_seconds": (SECONDS, "Seconds from the first to the last token"),
    "request_inference_time_seconds": (SECONDS, "Seconds from admission to the last token"),
    "request_detokenize_time_seconds": (SECONDS, "Seconds in the detokenizer"),
    "request_delivery_time_seconds": (SECONDS, "Seconds from the detokenizer to the gateway"),
    "request_prompt_tokens": (TOKEN_BOUNDS, "Number of prompt tokens"),
    "request_generation_tokens": (TOKEN_BOUNDS, "Number of generated tokens of a choice"),
    "request_params_n": (CHOICE_BOUNDS, "Number of choices"),
    "request_params_max_tokens": (
        TOKEN_BOUNDS,
        "Largest number of generated tokens that the request allows",
    ),
}


class RequestMetrics:
    """Counters and histograms of one gateway. Times are in seconds."""

    def __init__(self) -> None:
        self.num_slow_readers = 0
        self.num_disconnects = 0
        self.num_refused_connections = 0
        self.errors: Counter[str] = Counter()
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}

    def count_error(self, code: str) -> None:
        """Count a web request that failed with this error code."""
        self.errors[code] += 1

    def count_submitted(self, params: SamplingParams) -> None:
        """Count a request that is sent to the ring."""
        self.histograms["request_params_n"].observe(params.n)
        if params.max_new_tokens is not None:
            self.histograms["request_params_max_tokens"].observe(params.max_new_tokens)

    def count_completion(self, completion: Completion) -> None:
        """Count a finished choice and the time of each of its stages."""
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
        histograms["request_inference_time_seconds"].observe(last - times.admitted)
        histograms["request_detokenize_time_seconds"].observe(times.detokenized - last)
        histograms["request_delivery_time_seconds"].observe(times.delivered - times.detokenized)
        if len(times.token_times) > 1:
            per_token = (last - first) / (len(times.token_times) - 1)
            histograms["request_time_per_output_token_seconds"].observe(per_token)
        latencies = histograms["inter_token_latency_seconds"]
        for earlier, later in pairwise(times.token_times):
            latencies.observe(later - earlier)
