"""What a run prints: its progress, the short overview with a verdict, and the full block."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bench.cli.options import Options
from bench.client.load_generator import RequestRecord
from bench.client.resources import BENCH, Cost
from bench.report.metrics import ClientSummary, Sizes, Summary
from simulator.latency import MS, Percentiles, latency_lines, percentile, spread_text

if TYPE_CHECKING:
    from typing_extensions import Self


UNKNOWN = "n/a"
SHOWN_CLIENTS = 4
HEADING = "=== streaming benchmark ==="


@dataclass(frozen=True, slots=True)
class Result:
    """One run, with the server's info after it."""

    summary: Summary
    cost: Cost
    records: Sequence[RequestRecord]
    info: Mapping[str, Any]


def classic_block(options: Options, result: Result) -> str:
    """Return the lines that scripts parse, and further ones only for failures and --goodput."""
    lines = _classic_lines(options, result)
    if result.summary.failed:
        lines.append(failures(result.summary))
    return "\n".join([*lines, *_goodput_lines(options, result.summary)])


def _classic_lines(options: Options, result: Result) -> list[str]:
    return [
        HEADING,
        *_server_lines(options, result.info),
        *_load_lines(options, result.summary),
        *_time_lines(result.summary),
    ]


def block(options: Options, result: Result) -> str:
    """Return the lines of a measured run: the lines that scripts parse first, then further ones."""
    lines = [
        *_classic_lines(options, result),
        *_further_lines(options, result),
        *_traffic_lines(options, result.summary, result.info),
    ]
    return "\n".join(lines)


def _server_lines(options: Options, info: Mapping[str, Any]) -> list[str]:
    return [
        f"Model: {info.get('model', UNKNOWN)}",
        f"Device: {info.get('device', UNKNOWN)} ({info.get('dtype', UNKNOWN)})",
        f"Pretok: {_pretok(options)}",
        f"Tokenize workers: {_setting(options, info, 'frontend', 'tokenize_workers')}",
        f"Stream interval: {_setting(options, info, 'detok', 'stream_interval')}",
        *_feature_lines(options, info),
    ]


def _feature_lines(options: Options, info: Mapping[str, Any]) -> list[str]:
    """Return the lines about features, which only a Quadriga server reports."""
    if options.target.openai is not None:
        return [f"{name}: {UNKNOWN}" for name in ("Paged attention", "CUDA Graph", "NVTX")]
    pages = f", pages of {info['page_size']} tokens" if "page_size" in info else ""
    backend = _setting(options, info, "worker", "attention_backend")
    return [
        f"Paged attention: on, always (backend {backend}{pages})",
        f"CUDA Graph: {_switch(info, 'cuda_graph', 'cuda_graph' in options.requested)}",
        f"NVTX: {_switch(info, 'nvtx', False)}",
    ]


def _load_lines(options: Options, summary: Summary) -> list[str]:
    relative = options.load.send.gap_s is not None
    lag = f"{UNKNOWN} (relative schedule)" if relative else spread_text(summary.submit_lag)
    return [
        f"Requests: {summary.requests}",
        f"Prompt tokens (total): {summary.prompt_tokens}",
        f"Completion tokens (total): {summary.completion_tokens}",
        f"Submit wall: {summary.submit_wall * MS:.2f} ms",
        f"Submit interval/schedule: {_schedule(options)}",
        f"Submit lag p50/p95/p99: {lag}",
        f"add_request latency p50/p95/p99: {spread_text(summary.add_request, digits=3)}",
    ]


def _time_lines(summary: Summary) -> list[str]:
    return [
        f"Tokenize p50/p95/p99: {spread_text(summary.tokenize)}",
        *latency_lines(summary),
        f"Throughput (completion,total): {_number(summary.throughput)} tokens/s",
    ]


def _further_lines(options: Options, result: Result) -> list[str]:
    summary, cost = result.summary, result.cost
    return [
        f"Client->server p50/p95/p99: {spread_text(summary.to_server)}",
        f"Detok + delivery p50/p95/p99: {spread_text(summary.delivery)}",
        f"ITL as received p50/p95/p99: {spread_text(summary.itl_received)}",
        f"Sum of the parts - TTFT: {_parts_gap(summary)}",
        f"Prefix cache: {_prefix_cache(options, result.info)}",
        f"Prefix cache hits: {summary.cached_tokens} tokens"
        f" ({_percent(summary.cache_hit_rate)} of the prompt tokens)",
        f"Worker busy: {_percent(cost.busy_share)}"
        f" ({UNKNOWN if cost.steps is None else cost.steps} steps)",
        f"Step gap p50/p99: {_number(cost.step_gap_ms_p50, 3)}/{_number(cost.step_gap_ms_p99, 3)}"
        " ms",
        f"CPU time per completion token: {_cpu(cost, summary.completion_tokens)}",
        f"Resident memory: {_memory(cost)}",
        failures(summary),
    ]


def _traffic_lines(options: Options, summary: Summary, info: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Request rate asked/achieved: {_rate(options)} / {_number(summary.request_rate)}"
        " requests/s",
        f"Input length mean (lowest to highest): {_sizes(summary.input_len)}",
        f"Output length mean (lowest to highest): {_sizes(summary.output_len)}",
    ]
    if (uncounted := info.get("requests_without_usage")) is not None:
        lines.append(f"Tokens counted by: {_counted_by(summary, uncounted)}")
    lines += _goodput_lines(options, summary)
    if len(summary.clients) <= SHOWN_CLIENTS:
        lines += [line for client in summary.clients for line in _client_lines(client)]
    return lines


def _goodput_lines(options: Options, summary: Summary) -> list[str]:
    if summary.goodput is None:
        return []
    return [
        f"Goodput ({limits_text(options)}): {summary.goodput.share:.1%} of the requests,"
        f" {_number(summary.goodput.rate)} requests/s"
    ]


def _counted_by(summary: Summary, uncounted: int) -> str:
    """Return the source of token counts; `uncounted` requests of all runs had no usage."""
    if uncounted == 0:
        return "the server's usage"
    return f"chunks, in {min(uncounted, summary.requests)} requests or more: no usage came"


def _client_lines(client: ClientSummary) -> list[str]:
    name = f"Client {client.client}"
    return [
        f"{name} requests (failed): {client.requests} ({client.failed})",
        f"{name} TTFT p50/p95/p99: {spread_text(client.ttft)}",
        f"{name} ITL p50/p95/p99: {spread_text(client.itl)}",
    ]


def failures(summary: Summary) -> str:
    """Return the line with the number of failed requests and the first error."""
    first = f" (first error: {summary.first_error})" if summary.first_error else ""
    return f"Failed requests: {summary.failed}{first}"


def over_runs(results: Sequence[Result]) -> str:
    """Return the medians of the p50s of repeated runs, with their ranges."""
    rows: list[tuple[str, str, Callable[[Summary], float | None]]] = [
        ("TTFT p50", "ms", lambda s: _p50(s.ttft)),
        ("TPOT p50", "ms", lambda s: _p50(s.tpot)),
        ("Latency p50", "ms", lambda s: _p50(s.latency)),
        ("Throughput (completion,total)", "tokens/s", lambda s: s.throughput),
    ]
    lines = [f"=== median (lowest to highest) of {len(results)} runs ==="]
    for name, unit, value_of in rows:
        values = [v for v in (value_of(result.summary) for result in results) if v is not None]
        middle = f"{percentile(values, 50):.2f}" if values else UNKNOWN
        span = f" ({min(values):.2f} to {max(values):.2f})" if values else ""
        lines.append(f"{name}: {middle}{span} {unit}")
    return "\n".join(lines)


def _pretok(options: Options) -> str:
    if options.load.workload.text is None:
        return "on (token ids of a trace)" if options.load.spec is None else "on (random token ids)"
    return "on" if options.load.pretok else "off"


def _schedule(options: Options) -> str:
    """Return the gap between two submits and the kind of schedule."""
    spec, send = options.load.spec, options.load.send
    if send.gap_s is not None:
        return f"{send.gap_s * MS:g} ms / relative"
    if spec is None:
        return "as in the file / trace"
    if spec.max_concurrency is not None:
        return f"{spec.think_time * MS:g} ms after an end / closed loop of {spec.max_concurrency}"
    interval = MS / spec.request_rate
    bound = "" if send.max_in_flight is None else f", {send.max_in_flight} at a time"
    if math.isinf(spec.request_rate) or math.isinf(spec.burstiness):
        return f"{interval:g} ms / absolute{bound}"
    kind = "Poisson" if spec.burstiness == 1 else f"gamma of burstiness {spec.burstiness:g}"
    return f"{interval:g} ms on average / {kind}{bound}"


def _rate(options: Options) -> str:
    spec, gap_s = options.load.spec, options.load.send.gap_s
    if gap_s:
        return f"{1 / gap_s:g}"
    if spec is None or spec.max_concurrency is not None:
        return UNKNOWN
    return f"{spec.request_rate:g}" + (" chats" if spec.turns > 1 else "")


def _setting(options: Options, info: Mapping[str, Any], group: str, name: str) -> str:
    """Return a setting as the server reports it, or as the bench started the server."""
    if name in info or options.target.config is None:
        return str(info.get(name, UNKNOWN))
    return str(getattr(getattr(options.target.config, group), name))


def _switch(info: Mapping[str, Any], name: str, requested: bool) -> str:
    """Return the state of a feature; a server that does not report it does not have it."""
    state = "on" if info.get(name) else "off"
    if requested and state == "off":
        return f"{state} (asked for, but the server does not have it)"
    return state


def _prefix_cache(options: Options, info: Mapping[str, Any]) -> str:
    if "prefix_cache" not in info and options.target.config is not None:
        return "off" if options.target.config.scheduler.disable_radix_cache else "on"
    state = str(info.get("prefix_cache", UNKNOWN))
    return {"True": "on", "False": "off"}.get(state, state)


def _sizes(sizes: Sizes | None) -> str:
    return UNKNOWN if sizes is None else f"{sizes.mean:.1f} ({sizes.low} to {sizes.high}) tokens"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%}"


def _p50(spread: Percentiles | None) -> float | None:
    return None if spread is None else spread.p50


def _number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _parts_gap(summary: Summary) -> str:
    gap = summary.parts_gap
    return UNKNOWN if gap is None else f"{gap:.3f} ms at most, over all requests"


def _memory(cost: Cost) -> str:
    """Return the resident memory of the server's processes, without the bench client."""
    known = {name: size for name, size in cost.memory.items() if size and name != BENCH}
    if not known:
        return UNKNOWN
    parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in known.items())
    return f"{sum(known.values()) / 1e6:.0f} MB ({parts})"


def _cpu(cost: Cost, tokens: int) -> str:
    if tokens == 0:
        return UNKNOWN
    parts = [
        f"{name} {UNKNOWN if seconds is None else f'{seconds * MS / tokens:.3f} ms'}"
        for name, seconds in cost.cpu.items()
    ]
    return ", ".join(parts)


# Field of Summary, its name in the table, and the words for it in the verdict.
TTFT_PARTS = {
    "to_server": ("to server", "on the way to the server"),
    "tokenize": ("tokenize", "in the tokenizer"),
    "queue_wait": ("queue wait", "waiting in the queue"),
    "prefill": ("prefill", "in the prefill"),
    "delivery": ("delivery", "in detokenization and delivery"),
}
NAME_WIDTH, COLUMN_WIDTH = 18, 10
HEADER = ("mean", "p50", "p95", "p99")


def overview(options: Options, result: Result) -> str:
    """Return the lines of a measured run."""
    summary = result.summary
    lines = [
        f"{server_text(options, result.info)}: {load_text(options, summary)}",
        *_token_lines(summary),
        "",
        *table(summary),
        "",
        verdict(options, summary, result.cost),
    ]
    return "\n".join(lines)


def server_text(options: Options, info: Mapping[str, Any]) -> str:
    """Return model, device and number format of the measured server, as far as it names them."""
    model = info.get("model") or options.target.model or "unknown model"
    if "device" not in info:
        return str(model)
    return f"{model} on {info['device']} ({info.get('dtype', 'unknown dtype')})"


def load_text(options: Options, summary: Summary) -> str:
    """Return the number of requests and their schedule."""
    return f"{summary.requests} requests, {_schedule_of_load(options)}"


def _schedule_of_load(options: Options) -> str:
    spec, send = options.load.spec, options.load.send
    if send.gap_s is not None:
        return f"one every {send.gap_s * MS:g} ms" if send.gap_s else "all at once"
    if spec is None:
        return "at the times of the trace"
    if spec.max_concurrency is not None:
        return f"{spec.max_concurrency} in flight"
    if math.isinf(spec.request_rate):
        return "all at once"
    unit = "chats" if spec.turns > 1 else "requests"
    bound = "" if send.max_in_flight is None else f", at most {send.max_in_flight} in flight"
    return f"{spec.request_rate:g} {unit}/s{bound}"


def _token_lines(summary: Summary) -> list[str]:
    if summary.input_len is None or summary.output_len is None:
        return []
    cached = f", {summary.cache_hit_rate:.0%} of them cached" if summary.cache_hit_rate else ""
    return [
        f"prompts of {_range(summary.input_len)} tokens{cached}; answers of"
        f" {_range(summary.output_len)} tokens; {summary.duration:.1f} s"
    ]


def _range(sizes: Sizes) -> str:
    return str(sizes.low) if sizes.low == sizes.high else f"{sizes.low} to {sizes.high}"


def table(summary: Summary) -> list[str]:
    """Return the lines of the table: a row for each latency, in ms."""
    rows: list[tuple[str, Percentiles | None]] = [("TTFT", summary.ttft)]
    rows += [(f"  {name}", getattr(summary, key)) for key, (name, _) in TTFT_PARTS.items()]
    rows += [("TPOT", summary.tpot), ("ITL", summary.itl or summary.itl_received)]
    rows += [("latency", summary.latency)]
    return [
        f"{'ms':{NAME_WIDTH}}" + "".join(f"{name:>{COLUMN_WIDTH}}" for name in HEADER),
        *(_row(name, spread) for name, spread in rows if spread is not None),
    ]


def _row(name: str, spread: Percentiles) -> str:
    values = (getattr(spread, share) for share in HEADER)
    return f"{name:{NAME_WIDTH}}" + "".join(f"{ms:{COLUMN_WIDTH}.1f}" for ms in values)


def verdict(options: Options, summary: Summary, cost: Cost) -> str:
    """Return one line: rates, drafts, failures, goodput and the largest part of the TTFT."""
    parts = []
    if summary.failed:
        parts.append(
            f"{summary.failed} of {summary.requests} requests failed"
            f" (first error: {summary.first_error})"
        )
    if summary.throughput is not None:
        rate = summary.request_rate or 0.0
        parts.append(f"{rate:.1f} requests/s, {summary.throughput:.0f} tokens/s")
    if cost.drafted_tokens is not None and summary.completion_tokens:
        share = cost.drafted_tokens / summary.completion_tokens
        parts.append(f"{share:.0%} of the tokens came from drafts")
    if summary.goodput is not None:
        parts.append(f"{summary.goodput.share:.0%} within {limits_text(options)}")
    if (largest := largest_part(summary)) is not None:
        key, share = largest
        parts.append(f"TTFT is spent {100 * share:.0f} % {TTFT_PARTS[key][1]}")
    return "; ".join(parts) or "no request was sent"


def limits_text(options: Options) -> str:
    """Return the limits of --goodput."""
    limits = options.output.slo.limits()
    return ", ".join(f"{name.upper()} {ms:g} ms" for name, ms in limits.items())


def largest_part(summary: Summary) -> tuple[str, float] | None:
    """Return the largest part of the mean TTFT with its share, 0 to 1; None if unknown."""
    means = {key: getattr(summary, key).mean for key in TTFT_PARTS if getattr(summary, key)}
    total = sum(means.values())
    if "queue_wait" not in means or total <= 0:
        return None
    key = max(means, key=means.__getitem__)
    return key, means[key] / total


LINE_INTERVAL_S = 10.0


class Progress:
    """Progress of `total` requests on standard error; `update` counts one of them."""

    def __init__(self, total: int, title: str, line_interval_s: float = LINE_INTERVAL_S) -> None:
        self._total = total
        self._title = title
        self._interval_s = line_interval_s
        self._done = 0
        self._began_at = self._shown_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=title, unit="req", leave=False)

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self) -> None:
        """Count one request, and show the progress if it is due."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
            return
        now = time.monotonic()
        if now - self._shown_at >= self._interval_s and self._done < self._total:
            self._shown_at = now
            seconds = now - self._began_at
            print(
                f"{self._title}: {self._done} of {self._total} requests after {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
