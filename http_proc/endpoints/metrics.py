"""GET /metrics for Prometheus: the ring's gauges and counters, and what requests took here.

Names and meanings follow vLLM's and SGLang's, with the prefix `quadriga:`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import psutil
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from http_proc.gateway import GATEWAY
from http_proc.observe.request_metrics import RequestMetrics
from quadriga.errors import QuadrigaError
from quadriga.histogram import buckets

PREFIX = "quadriga:"
OF_HTTP = "Of the requests that came by HTTP"

GAUGES = {
    "num_requests_running": ("running", "Requests that hold a slot"),
    "num_requests_waiting": ("waiting", "Requests that wait to be admitted"),
    "num_grammar_queue_reqs": ("waiting_for_grammar", "Those of them whose grammar is compiled"),
    "num_used_tokens": ("", "Tokens that the KV pages of requests hold or have room for"),
    "new_token_ratio": ("new_token_ratio", "Share of the new tokens that admission reserves"),
    "max_total_num_tokens": ("", "Tokens that the KV pool holds"),
    "kv_cache_usage_perc": ("", "Share of the KV pages that requests hold, 0 to 1"),
    "journal_failed": ("", "1 while the journal cannot be written, else 0"),
    "step_gap_p99_ms": ("step_gap_ms_p99", "Idle time of the worker between two planned steps"),
}
COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of requests that gave a token"),
    "generation_tokens": ("generation_tokens_total", "Tokens generated"),
    "prefix_cache_queries": ("prompt_tokens_total", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("cached_tokens_total", "Prompt tokens found in the prefix cache"),
    "num_preemptions": ("retractions", "Requests that gave their place up and came back"),
    "steps": ("steps", "Steps of the worker"),
    "prefill_steps": ("prefill_steps", "Steps with prompt tokens in them"),
    "late_plans": ("late_plans", "Steps that the worker had to wait for"),
    "worker_busy_seconds": ("busy_seconds", "Forward and sampling"),
}
"""By their names here: the key of the ring's info, and what it is."""
BY_LABEL = (
    ("request_success", "Requests that have ended, by reason", "finished_reason", "ended"),
    ("num_aborted_requests", "Requests that were ended from outside", "reason", "aborts"),
    ("request_errors", "Requests that the scheduler ended with an error", "code", "errors"),
)
"""Counters with a label: name, what it is, the label, the key of the ring's info."""
POOL = {"page_size": "page_size", "num_pages": "pages_total", "prefix_cache": "prefix_cache"}


class Collector:
    """One look at everything. info: the ring's, empty where it does not answer."""

    def __init__(self, model: str, info: dict[str, Any], live: int, own: RequestMetrics) -> None:
        self._model = model
        self._info = info
        self._live = live
        self._own = own

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("http_requests_live", "Web requests that are being answered", self._live)
        if self._info.get("ready"):
            yield from self._ring()
        yield from _processes(self._info.get("pids", {}))
        for name, histogram in self._own.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, OF_HTTP, labels=["model_name"])
            family.add_metric([self._model], *buckets(histogram.as_map()))
            yield family
        errors = CounterMetricFamily(
            PREFIX + "http_errors", "Web requests that failed", labels=["model_name", "code"]
        )
        for code, count in self._own.errors.items():
            errors.add_metric([self._model, code], count)
        yield errors
        yield self._counter(
            "http_slow_readers", "Clients that were cut off", self._own.slow_readers
        )
        yield self._counter(
            "http_disconnects", "Web requests whose client left", self._own.disconnects
        )
        yield self._counter(
            "http_connections_refused",
            "Connections over --max-http-connections",
            self._own.refused_connections,
        )

    def _ring(self) -> Iterator[Metric]:
        info = self._info
        pages, held = info["pages_total"], info["pages_held"]
        derived = {
            "max_total_num_tokens": pages * info["page_size"],
            "num_used_tokens": held * info["page_size"],
            "kv_cache_usage_perc": held / pages if pages else 0.0,
            "journal_failed": int(info["journal"] == "failed"),
        }
        for name, (key, text) in GAUGES.items():
            yield self._gauge(name, text, derived[name] if not key else info[key])
        for name, (key, text) in COUNTERS.items():
            yield self._counter(name, text, info[key])
        for name, text, label, key in BY_LABEL:
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
            for value, count in info[key].items():
                family.add_metric([self._model, value], count)
            yield family
        tokens = HistogramMetricFamily(
            PREFIX + "iteration_tokens_total", "Tokens of a step", labels=["model_name"]
        )
        tokens.add_metric([self._model], *buckets(info["step_tokens"]))
        yield tokens
        stages = HistogramMetricFamily(
            PREFIX + "per_stage_req_latency_seconds",
            "Of every request, also those that did not come by HTTP",
            labels=["model_name", "stage"],
        )
        for stage, times in info["stage_seconds"].items():
            stages.add_metric([self._model, stage], *buckets(times))
        yield stages
        pool = GaugeMetricFamily(
            PREFIX + "cache_config_info", "The KV pool", labels=["model_name", *POOL]
        )
        pool.add_metric([self._model, *(str(info[key]) for key in POOL.values())], 1)
        yield pool

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


def _processes(pids: dict[str, int]) -> Iterable[Metric]:
    """CPU time and memory of each process of the ring that is on this machine."""
    cpu = CounterMetricFamily(PREFIX + "process_cpu_seconds", "CPU time", labels=["process"])
    memory = GaugeMetricFamily(PREFIX + "process_resident_bytes", "Memory", labels=["process"])
    for name, pid in {**pids, "http_proc": psutil.Process().pid}.items():
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            memory.add_metric([name], process.memory_info().rss)
            cpu.add_metric([name], times.user + times.system)
        except psutil.Error:
            continue
    return cpu, memory


async def metrics(request: web.Request) -> web.Response:
    """All of it, also where the ring does not answer."""
    gateway = request.app[GATEWAY]
    try:
        info = await gateway.info()
    except QuadrigaError:
        info = {}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(gateway.model, info, gateway.live, gateway.metrics))
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )
