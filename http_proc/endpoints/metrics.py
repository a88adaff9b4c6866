"""GET /metrics: gauges and counters of the ring, and the metrics of the requests by HTTP.

Names and meanings follow vLLM and SGLang, with the prefix `quadriga:`. docs/http.md lists them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from http_proc.apis.batch.batch_metrics import BatchCollector
from http_proc.apis.batch.service import BATCHES
from http_proc.apis.responses.store import RESPONSE_STORE
from http_proc.apis.responses.stored.store_metrics import ResponseStoreCollector
from http_proc.caller import current_caller
from http_proc.endpoints.metric_names import (
    COUNTERS,
    GAUGES,
    LABELED_COUNTERS,
    OFFLOAD_COUNTERS,
    OFFLOAD_GAUGES,
    POOL_LABELS,
    PREFIX,
    SPECULATION_BY_PLACE,
    SPECULATION_COUNTERS,
    TENANT_COUNTERS,
)
from http_proc.gateway import GATEWAY
from http_proc.observe.request_metrics import HISTOGRAMS, RequestMetrics
from http_proc.observe.trace_metrics import TraceCollector
from http_proc.streams.stream_metrics import StreamCollector
from http_proc.streams.stream_table import STREAMS
from quadriga.errors import NonFiniteLogits, QuadrigaError
from quadriga.histogram import buckets


class Collector:
    """One sample of all metrics.

    Args:
        info: the ring's info, empty if the ring does not answer.
        num_open: number of web requests that are being answered.
        key_file_failed: whether --keys cannot be read; None without the flag.
    """

    def __init__(
        self,
        model: str,
        info: dict[str, Any],
        num_open: int,
        http: RequestMetrics,
        key_file_failed: bool | None = None,
    ) -> None:
        self._model = model
        self._info = info
        self._num_open = num_open
        self._http = http
        self._key_file_failed = key_file_failed

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        yield self._gauge(
            "http_requests_live", "Number of web requests that are being answered", self._num_open
        )
        if self._info.get("replicas"):
            yield from self._replicas()
        elif self._info.get("ready"):
            yield from self._ring(self._info)
        yield from _processes(self._info.get("pids", {}))
        http = self._http
        for name, histogram in http.histograms.items():
            text = f"{HISTOGRAMS[name][1]}, of requests by HTTP"
            yield self._histogram(name, text, {(): histogram.as_map()})
        yield self._labeled_counter(
            "http_errors", "Number of web requests that failed, by error code", "code", http.errors
        )
        text = "Number of clients that were disconnected because they read too slowly"
        yield self._counter("http_slow_readers", text, http.num_slow_readers)
        text = "Number of web requests whose client disconnected before the end"
        yield self._counter("http_disconnects", text, http.num_disconnects)
        if self._key_file_failed is not None:
            text = "1 while --keys cannot be read, and its tenants are those of an earlier file"
            yield self._gauge("key_file_failed", text, int(self._key_file_failed))
        text = "Number of connections refused because of --max-http-connections"
        yield self._counter("http_connections_refused", text, http.num_refused_connections)

    def _replicas(self) -> Iterator[Metric]:
        """Yield the ring's metrics of several replicas, each with the label `replica`."""
        families: dict[str, Metric] = {}
        up = GaugeMetricFamily(
            PREFIX + "replica_up",
            "1 while the replica serves, else 0",
            labels=["model_name", "replica"],
        )
        infos = {info["replica"]: info for info in self._info["replicas"] if info.get("ready")}
        for number in range(self._info["num_replicas"]):
            up.add_metric([self._model, str(number)], number in infos)
        for number, info in infos.items():
            for family in self._ring(info):
                whole = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                whole.samples += [
                    sample._replace(labels={**sample.labels, "replica": str(number)})
                    for sample in family.samples
                ]
        yield up
        yield self._counter(
            "requests_moved",
            "Number of requests that went on at another replica",
            self._info["requests_moved"],
        )
        yield self._counter(
            "results_dropped",
            "Number of results of replicas that no longer owned the request",
            self._info["results_dropped"],
        )
        yield from families.values()

    def _ring(self, info: dict[str, Any]) -> Iterator[Metric]:
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
        yield self._counter(
            "nan_logits",
            "Number of choices that ended because the model's logits were not finite",
            info["errors"].get(NonFiniteLogits.code, 0),
        )
        if SPECULATION_BY_PLACE in info:
            yield from self._speculation(info)
        if "kv_offload_pages" in info:
            yield from self._offload(info)
        for name, text, label, key in LABELED_COUNTERS:
            yield self._labeled_counter(name, text, label, info[key])
        for index, (name, text) in enumerate(TENANT_COUNTERS if info.get("tenants") else ()):
            counts = {tenant: numbers[index] for tenant, numbers in info["tenants"].items()}
            yield self._labeled_counter(name, text, "tenant", counts)
        text = "Number of tokens that one step computes"
        yield self._histogram("iteration_tokens_total", text, {(): info["step_tokens"]})
        text = "Seconds that a request spends in each stage, by HTTP or ZeroMQ"
        stages: dict[tuple[str, ...], dict[str, float]] = {
            (stage,): times for stage, times in info["stage_seconds"].items()
        }
        yield self._histogram("per_stage_req_latency_seconds", text, stages, "stage")
        pool = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "Always 1; the labels describe the KV pool",
            labels=["model_name", *POOL_LABELS],
        )
        pool.add_metric([self._model, *(str(info[key]) for key in POOL_LABELS.values())], 1)
        yield pool

    def _speculation(self, info: dict[str, Any]) -> Iterator[Metric]:
        """Yield the metrics of guessed tokens."""
        for name, text in SPECULATION_COUNTERS.items():
            yield self._counter(name, text, info[f"{name}_total"])
        text = "Number of guessed tokens that were right, by their place in the row"
        places = info[SPECULATION_BY_PLACE]
        yield self._labeled_counter(SPECULATION_BY_PLACE, text, "position", places)

    def _offload(self, info: dict[str, Any]) -> Iterator[Metric]:
        """Yield the metrics of KV pages beyond the pool."""
        for name, text in OFFLOAD_GAUGES.items():
            yield self._gauge(name, text, info[name])
        for name, (key, text) in OFFLOAD_COUNTERS.items():
            yield self._counter(name, text, info[key])

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _labeled_counter(
        self, name: str, text: str, label: str, counts: Mapping[str, float]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for value, count in counts.items():
            family.add_metric([self._model, value], count)
        return family

    def _histogram(
        self,
        name: str,
        text: str,
        samples: Mapping[tuple[str, ...], dict[str, float]],
        *labels: str,
    ) -> HistogramMetricFamily:
        """Return a family with one histogram for each tuple of label values."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
        for values, histogram in samples.items():
            family.add_metric([self._model, *values], *buckets(histogram))
        return family


def _processes(pids: dict[str, int]) -> Iterable[Metric]:
    """Return CPU time, memory and start of each process that runs on this machine."""
    cpu = CounterMetricFamily(
        PREFIX + "process_cpu_seconds", "CPU time of the process in seconds", labels=["process"]
    )
    memory = GaugeMetricFamily(
        PREFIX + "process_resident_bytes",
        "Resident memory of the process in bytes",
        labels=["process"],
    )
    started = GaugeMetricFamily(
        PREFIX + "process_start_time_seconds",
        "Start of the process in Unix time; it changes with a restart",
        labels=["process"],
    )
    for name, pid in {**pids, "http_proc": psutil.Process().pid}.items():
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            memory.add_metric([name], process.memory_info().rss)
            started.add_metric([name], process.create_time())
            cpu.add_metric([name], times.user + times.system)
        except psutil.Error:
            continue
    return cpu, memory, started


class UsageCollector:
    """One sample of what a tenant has used, which is all that its own key shows.

    Args:
        usage: the numbers of TENANT_COUNTERS; empty without any.
    """

    def __init__(self, model: str, tenant: str, usage: Sequence[float]) -> None:
        self._labels = [model, tenant]
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        for (name, text), count in zip(TENANT_COUNTERS, self._usage, strict=False):
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", "tenant"])
            family.add_metric(self._labels, count)
            yield family


async def metrics(request: web.Request) -> web.Response:
    """Return all metrics, without those of the ring if it does not answer.

    A tenant's key gets those of the tenant's own usage.
    """
    gateway = request.app[GATEWAY]
    try:
        info = await gateway.ring_info.current()
    except QuadrigaError:
        info = {}
    registry = CollectorRegistry(auto_describe=False)
    if (entry := current_caller().entry) is not None:
        usage = (info.get("tenants") or {}).get(entry.name, ())
        registry.register(UsageCollector(gateway.model, entry.name, usage))
        return _exposed(registry)
    has_failed = None if gateway.tenant_file is None else gateway.tenant_file.has_failed
    registry.register(Collector(gateway.model, info, gateway.num_open, gateway.metrics, has_failed))
    registry.register(BatchCollector(gateway.model, request.app[BATCHES]))
    registry.register(ResponseStoreCollector(gateway.model, request.app.get(RESPONSE_STORE)))
    registry.register(StreamCollector(gateway.model, request.app[STREAMS], gateway.stream_rows))
    registry.register(TraceCollector(gateway.model, [info, gateway.traces.info()]))
    return _exposed(registry)


def _exposed(registry: CollectorRegistry) -> web.Response:
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )
