"""The JSON files of a run: our own, and that of SGLang's and vLLM's bench clients."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.cli.options import Options
from bench.client.load_generator import RequestRecord
from bench.report.metrics import Summary, in_flight, token_rates
from bench.report.report import Result
from quadriga.errors import ConfigError
from simulator.latency import MS, Slo, percentile


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append_json(path: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    """Append each document as a line."""
    with path.open("a") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)


def write_json(
    path: Path,
    options: Options,
    info: Mapping[str, Any],
    results: Sequence[Result],
    warmups: Sequence[Summary],
) -> None:
    """Write all figures, with flags and info of the server. Times are those of the dataclasses."""
    config = options.target.config
    document = {
        "date": now(),
        "flags": options.flags,
        "server_flags": None if config is None else dataclasses.asdict(config),
        "server_info": dict(info),
        "warmups": [dataclasses.asdict(summary) for summary in warmups],
        "runs": [_run_as_dict(result, options.output.details) for result in results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def _run_as_dict(result: Result, details: bool) -> dict[str, Any]:
    run: dict[str, Any] = {
        "summary": dataclasses.asdict(result.summary),
        "cost": dataclasses.asdict(result.cost),
        "server_info": dict(result.info),
    }
    if details:
        run["records"] = [dataclasses.asdict(record) for record in result.records]
    return run


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file that `write_json` wrote, or raise ConfigError."""
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of bench.serving --json: {error!r}") from None
    return runs


# Figures of a run by the names and definitions that the bench clients of SGLang and vLLM share.
#
# TTFT: from the submit to the first chunk with a token. TPOT: from that chunk to the end of the
# request, divided by its tokens but one. ITL: gaps between chunks of any size.


def figures(result: Result, slo: Slo) -> dict[str, float]:
    """Return all figures by their conventional keys. Times in ms, the duration in seconds."""
    summary = result.summary
    done = [record for record in result.records if record.error is None]
    start = min((record.submit_start for record in done), default=0.0)
    seconds = summary.duration or math.inf
    values_by_key: dict[str, float] = {
        "completed": len(done),
        "failed": summary.failed,
        "duration": summary.duration,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.completion_tokens,
        "request_throughput": len(done) / seconds,
        "input_throughput": summary.prompt_tokens / seconds,
        "output_throughput": summary.completion_tokens / seconds,
        "max_output_tokens_per_s": max(token_rates(done, start, start + summary.duration, 1.0)),
        "total_token_throughput": (summary.prompt_tokens + summary.completion_tokens) / seconds,
        "max_concurrent_requests": in_flight(done).peak,
        "concurrency": sum(record.finished - record.submit_start for record in done) / seconds,
    }
    if slo and summary.goodput is not None:
        values_by_key["request_goodput"] = summary.goodput.rate or 0.0
    for name, values in _latencies(done).items():
        values_by_key |= _shares(name, values)
    return values_by_key


def _latencies(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the latencies of the finished requests in ms."""
    return {
        "ttft": [_ms(r.submit_start, r.first_received) for r in done if r.arrivals],
        "tpot": [
            _ms(r.first_received, r.finished) / (r.completion_tokens - 1)
            for r in done
            if r.completion_tokens > 1 and r.arrivals
        ],
        "itl": [_ms(before, after) for r in done for before, after in pairwise(r.chunks)],
        "e2e_latency": [_ms(r.submit_start, r.finished) for r in done],
    }


def _ms(start: float, end: float) -> float:
    return max(0.0, end - start) * MS


def _shares(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles; zeros if there are no values, as is the convention."""
    values = values or [0.0]
    mean = sum(values) / len(values)
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
        f"p95_{name}_ms": percentile(values, 95),
        f"p99_{name}_ms": percentile(values, 99),
        f"max_{name}_ms": max(values),
    }


def document(options: Options, result: Result, date: str) -> dict[str, Any]:
    """Return one run as a document for a line of JSON, with --output-details every request too."""
    flags = options.flags
    run: dict[str, Any] = {
        "date": date,
        "backend": flags["backend"],
        "dataset_name": flags["dataset_name"],
        "model_id": result.info.get("model") or options.target.model,
        "tokenizer_id": options.target.tokenizer or options.target.model,
        "num_prompts": result.summary.requests,
        "request_rate": flags["request_rate"],
        "burstiness": flags["burstiness"],
        "max_concurrency": flags["max_concurrency"],
        "random_input_len": flags["random_input_len"],
        "random_output_len": flags["max_new_tokens"],
        **figures(result, options.output.slo),
        "server_info": dict(result.info),
    }
    # vLLM and SGLang use different names for these; the document has both.
    run["total_throughput"] = run["total_token_throughput"]
    for share in ("mean", "median", "std", "p95", "p99", "max"):
        run[f"{share}_e2el_ms"] = run[f"{share}_e2e_latency_ms"]
    return run | (_details(result.records) if options.output.output_details else {})


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the figures of each request, in order of submission. Times in seconds."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.completion_tokens for r in records],
        "ttfts": [_ms(r.submit_start, r.first_received) / MS for r in records],
        "itls": [[after - before for before, after in pairwise(r.chunks)] for r in records],
        "start_times": [r.submit_start for r in records],
        "errors": [r.error or "" for r in records],
    }
