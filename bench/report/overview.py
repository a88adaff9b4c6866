"""The default output of a run: its load, one table of latencies and one line of verdict."""

import math
from collections.abc import Mapping
from typing import Any

from bench.cli.options import Options
from bench.metrics.metrics import Sizes, Summary
from bench.metrics.percentiles import MS, Percentiles
from bench.report.report import Result

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


def block(options: Options, result: Result) -> str:
    """Return the lines of a measured run."""
    summary = result.summary
    lines = [
        f"{server_text(options, result.info)}: {load_text(options, summary)}",
        *_token_lines(summary),
        "",
        *table(summary),
        "",
        verdict(options, summary),
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
    return f"{summary.requests} requests, {_schedule(options)}"


def _schedule(options: Options) -> str:
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


def verdict(options: Options, summary: Summary) -> str:
    """Return one line: rates, failures, goodput and the part that takes most of the TTFT."""
    parts = []
    if summary.failed:
        parts.append(
            f"{summary.failed} of {summary.requests} requests failed"
            f" (first error: {summary.first_error})"
        )
    if summary.throughput is not None:
        rate = summary.request_rate or 0.0
        parts.append(f"{rate:.1f} requests/s, {summary.throughput:.0f} tokens/s")
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
