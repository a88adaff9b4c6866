"""GET /metrics: of the server, of the requests by HTTP, and of what is kept for clients.

Names and meanings follow vLLM and SGLang, with the prefix `quadriga:`; docs/metrics.md lists them.
First names and help texts, then the families of each part of the gateway, then the handler.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

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

from http_proc.apis.responses.store import RESPONSE_STORE, ResponseStore
from http_proc.apis.responses.stored_responses import StoredResponses
from http_proc.core.caller import current_caller
from http_proc.core.gen_ai import GEN_AI, GenAiLabels, GenAiMetrics
from http_proc.core.observe import HISTOGRAMS, AnswerMetrics, RequestMetrics
from http_proc.core.served_model import wall_seconds
from http_proc.jobs.batches import BATCHES, BatchService
from http_proc.web import exchange, stream_rows
from http_proc.web.resumable import STREAM_ROWS, STREAMS, StreamTable
from quadriga.errors import NonFiniteLogits, QuadrigaError
from quadriga.server.histogram import buckets
from quadriga.server.model_list import ModelLoad
from quadriga.server.processes.model_turns import ModelState

PREFIX = "quadriga:"
# The process of a server that belongs to all of its models.
LAUNCHER = "launcher"

# Metric name -> (key of the ring's info, help text). Gauges without a key are computed.
GAUGES = {
    "num_requests_running": ("running", "Number of requests that hold a slot of the running batch"),
    "num_requests_waiting": (
        "waiting",
        "Number of requests that wait for a slot, KV pages or a grammar",
    ),
    "num_grammar_queue_reqs": (
        "waiting_for_grammar",
        "Number of waiting requests whose grammar the worker compiles",
    ),
    "num_adapter_queue_reqs": (
        "waiting_for_adapter",
        "Number of waiting requests whose adapter is being loaded, or waits for a place",
    ),
    "num_used_tokens": ("", "Number of tokens that fit into the KV pages that requests hold"),
    "new_token_ratio": (
        "new_token_ratio",
        "Fraction of max_new_tokens for which admission reserves KV pages",
    ),
    "max_total_num_tokens": ("", "Number of tokens that fit into the KV pool"),
    "kv_cache_usage_perc": ("", "Fraction of the KV pages that requests hold, from 0 to 1"),
    "journal_failed": ("", "1 while the journal cannot be written, else 0"),
    "step_gap_p99_ms": (
        "step_gap_ms_p99",
        "Idle time of the worker between two steps, 99th percentile in ms",
    ),
}
COUNTERS = {
    "prompt_tokens": (
        "prompt_tokens_total",
        "Number of prompt tokens of the requests that generated a token or a vector",
    ),
    "generation_tokens": ("generation_tokens_total", "Number of generated tokens"),
    "prefix_cache_queries": (
        "prompt_tokens_total",
        "Number of prompt tokens looked up in the prefix cache",
    ),
    "prefix_cache_hits": (
        "cached_tokens_total",
        "Number of prompt tokens found in the prefix cache",
    ),
    "num_preemptions": (
        "retractions",
        "Number of times that a running request was preempted (retracted)",
    ),
    "steps": ("steps", "Number of steps of the worker"),
    "prefill_steps": ("prefill_steps", "Number of steps of the worker that held prompt tokens"),
    "late_plans": (
        "late_plans",
        "Number of steps whose plan arrived after the previous step had ended",
    ),
    "worker_busy_seconds": (
        "busy_seconds",
        "Seconds that the worker spent in forward and sampling",
    ),
}
# Only of a server that guesses tokens.
SPECULATION_COUNTERS = {
    "spec_decode_num_drafts": "Number of rows of steps in which tokens were guessed",
    "spec_decode_num_draft_tokens": "Number of guessed tokens",
    "spec_decode_num_accepted_tokens": "Number of guessed tokens that were right",
}
SPECULATION_BY_PLACE = "spec_decode_num_accepted_tokens_per_pos"
# Of cached prefixes that requests ask to keep: (key of the ring's info, help text).
PIN_GAUGES = {
    "cache_pins": "Number of cached prefixes that are kept because requests ask for it",
    "cache_pinned_pages": "Number of KV pages of these prefixes",
    "cache_pinned_pages_max": "Largest number of such pages (--cache-pin-fraction)",
}
PIN_COUNTERS = {
    "cache_pins_gave_way": "Number of KV pages not kept any longer because a request needed room",
    "cache_pins_over_limit": "Number of KV pages not kept any longer for --cache-pin-fraction",
    "cache_pins_expired": "Number of prefixes whose time was over",
    "cache_pins_released": "Number of prefixes that were released",
}
# Only of a server with KV pages beyond the pool: (key of the ring's info, help text).
OFFLOAD_GAUGES = {
    "kv_offload_pages": "Number of KV pages in the tiers beyond the pool, or on their way there",
    "kv_offload_disk_failed": "1 while no KV pages can be written to --kv-cache-dir, else 0",
}
OFFLOAD_COUNTERS = {
    "external_prefix_cache_hits": (
        "kv_offload_loaded_tokens_total",
        "Number of tokens whose keys and values were loaded from the tiers beyond the pool",
    ),
    "kv_offload_loads": ("kv_offload_loads_total", "Number of loads of KV pages into the pool"),
    "kv_offload_load_seconds": (
        "kv_offload_load_seconds_total",
        "Seconds that loads of KV pages took",
    ),
    "kv_offload_stored_pages": (
        "kv_offload_stored_pages_total",
        "Number of KV pages that the tiers beyond the pool have taken in",
    ),
    "kv_offload_missed_pages": (
        "kv_offload_missed_pages_total",
        "Number of loads that ended early, because a KV page was not there any more",
    ),
    "kv_offload_damaged_pages": (
        "kv_offload_damaged_pages_total",
        "Number of files of KV pages that were not what was written",
    ),
}
# Only where replicas compute prompts for others, as above.
TRANSFER_COUNTERS = {
    "kv_transfer_pages": (
        "kv_transfer_pages_total",
        "Number of KV pages that came from replicas which compute prompts",
    ),
    "kv_transfer_bytes": ("kv_transfer_bytes_total", "Bytes of these pages"),
    "kv_transfer_seconds": (
        "kv_transfer_seconds_total",
        "Seconds that loads with such pages took",
    ),
}
# Counters with a label: (metric name, help text, label, key of the ring's info).
LABELED_COUNTERS = (
    (
        "request_success",
        "Number of finished choices by their finish reason",
        "finished_reason",
        "ended",
    ),
    (
        "num_aborted_requests",
        "Number of aborted choices by the origin of the abort",
        "reason",
        "aborts",
    ),
    (
        "request_errors",
        "Number of choices that the scheduler ended with an error",
        "code",
        "errors",
    ),
)
# Counters of each tenant, in the order of the numbers in the ring's info.
TENANT_COUNTERS = (
    ("tenant_requests", "Number of requests of a tenant that have ended"),
    ("tenant_prompt_tokens", "Number of prompt tokens of a tenant"),
    ("tenant_cached_tokens", "Number of prompt tokens of a tenant found in the prefix cache"),
    ("tenant_generation_tokens", "Number of generated tokens of a tenant"),
    ("tenant_queue_seconds", "Seconds that the requests of a tenant spent in the waiting queue"),
)
# Label of cache_config_info -> key of the ring's info. A page is vLLM's block, and routers look for
# vLLM's names: see the model server protocol of the Gateway API's inference extension.
POOL_LABELS = {
    "page_size": "page_size",
    "num_pages": "pages_total",
    "prefix_cache": "prefix_cache",
    "block_size": "page_size",
    "num_gpu_blocks": "pages_total",
}


class Families:
    """Make the metric families of one model, each of whose samples has the model's name.

    Args:
        model: name of the model.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge with one sample."""
        return self.labeled(name, text, "", {"": value}, GaugeMetricFamily)

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Return a counter with one sample."""
        return self.labeled(name, text, "", {"": value})

    def labeled(
        self,
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        """Return a family with a sample for each value of a label; "": the model's name alone."""
        family = kind(PREFIX + name, text, labels=["model_name", *filter(None, [label])])
        for of_label, value in values.items():
            family.add_metric([self._model, *([of_label] if label else [])], value)
        return family

    def histogram(
        self,
        name: str,
        text: str,
        samples: Mapping[tuple[str, ...], dict[str, float]],
        *labels: str,
    ) -> Metric:
        """Return a family with one histogram for each tuple of label values."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name", *labels])
        for values, histogram in samples.items():
            family.add_metric([self._model, *values], *buckets(histogram))
        return family


def of_batches(make: Families, service: BatchService) -> Iterator[Metric]:
    """Yield the metrics of batches and files."""
    states = service.num_by_status()
    text = "Number of batches by their state"
    yield make.labeled("batches", text, "status", states, GaugeMetricFamily)
    lines = {outcome: service.num_lines[outcome] for outcome in ("completed", "failed")}
    text = "Number of lines of batches by their outcome: completed or failed"
    yield make.labeled("batch_lines", text, "outcome", lines)
    text = "Size of all stored files in bytes"
    yield make.gauge("stored_file_bytes", text, service.files.num_bytes)


def of_responses(make: Families, store: ResponseStore | None) -> Iterator[Metric]:
    """Yield the metrics of stored responses; none without a store."""
    if not isinstance(store, StoredResponses):
        return
    size = store.size
    yield make.gauge("stored_responses", "Number of stored responses", size.num_responses)
    text = "Number of stored conversations"
    yield make.gauge("stored_conversations", text, size.num_conversations)
    text = "Number of responses that are made in the background"
    yield make.gauge("background_responses", text, size.num_open)
    text = "Bytes of the file of stored responses that are in use"
    yield make.gauge("stored_response_bytes", text, size.num_bytes)
    text = "1 while responses cannot be stored, else 0"
    yield make.gauge("response_store_failed", text, int(store.has_failed))
    saves = {outcome: store.outcomes[outcome] for outcome in ("stored", "failed")}
    text = "Number of responses to be stored by the outcome: stored or failed"
    yield make.labeled("response_saves", text, "outcome", saves)


def of_streams(
    make: Families, table: StreamTable, rows: stream_rows.StreamRows
) -> Iterator[Metric]:
    """Yield the metrics of resumable streams."""
    text = "Number of resumable streams that are kept"
    yield make.gauge("resumable_streams", text, len(table))
    text = "Size of their events and requests in bytes"
    yield make.gauge("resumable_stream_bytes", text, table.num_bytes)
    text = "1 while the file of resumable streams cannot be written, else 0"
    yield make.gauge("resumable_rows_failed", text, int(rows.has_failed))
    text = "Number of times that a stream was read again"
    yield make.counter("streams_resumed", text, table.num_resumed)
    text = "Number of streams that ended because no client has read them in time"
    yield make.counter("streams_expired", text, table.num_expired)


# Metric name -> (key of an exporter's info, help text).
TRACE_COUNTERS = {
    "otlp_traces_exported": (
        "traces_exported",
        "Number of traces that the OTLP collector has taken, those of gateway and server apart",
    ),
    "otlp_traces_dropped": (
        "traces_dropped",
        "Number of traces that the OTLP collector has not taken in time",
    ),
}


def of_traces(make: Families, infos: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the counters of all exporters; without --otlp-endpoint there are none."""
    for name, (key, text) in TRACE_COUNTERS.items():
        counts = [info[key] for info in infos if key in info]
        if counts:
            yield make.counter(name, text, sum(counts))


def of_gen_ai(metrics: GenAiMetrics) -> Iterator[Metric]:
    """Yield the histograms of OpenTelemetry's conventions, in its translation of names."""
    for name, (_, text) in GEN_AI.items():
        family = HistogramMetricFamily(name, text, labels=GenAiLabels._fields)
        for labels, histogram in metrics.histograms[name].items():
            family.add_metric(labels, *buckets(histogram.as_map()))
        yield family


def of_gateway(
    default: str, http: RequestMetrics, pids: Mapping[str, int], key_file_failed: bool | None
) -> Iterator[Metric]:
    """Yield the metrics of the gateway itself.

    Args:
        default: name of the model that stands for the whole server.
        http: the counters.
        pids: of the processes that belong to no model, but for the gateway's.
        key_file_failed: whether --keys cannot be read; None without the flag.
    """
    make = Families(default)
    yield from of_processes({**pids, "http_proc": psutil.Process().pid})
    errors: dict[str, Counter[str]] = {default: Counter()}
    for (model, code), count in http.errors.items():
        errors.setdefault(model or default, Counter())[code] += count
    text = "Number of web requests that failed, by error code"
    for model, codes in errors.items():
        yield Families(model).labeled("http_errors", text, "code", codes)
    text = "Number of clients that were disconnected because they read too slowly"
    yield make.counter("http_slow_readers", text, http.num_slow_readers)
    text = "Number of web requests whose client disconnected before the end"
    yield make.counter("http_disconnects", text, http.num_disconnects)
    if key_file_failed is not None:
        text = "1 while --keys cannot be read, and its tenants are those of an earlier file"
        yield make.gauge("key_file_failed", text, int(key_file_failed))
    text = "Number of connections refused because too many were open"
    yield make.counter("http_connections_refused", text, http.num_refused_connections)


def of_load(make: Families, load: ModelLoad) -> Iterator[Metric]:
    """Yield what says whether a model is loaded."""
    states = {state.value: float(state.value == load.state) for state in ModelState}
    text = "1 for the state of the model, 0 for the others"
    yield make.labeled("model_state", text, "state", states, GaugeMetricFamily)
    text = "Number of times that the model was loaded"
    yield make.counter("model_loads", text, load.num_loads)
    text = "Number of times that the model was unloaded, also for the turn of another one"
    yield make.counter("model_unloads", text, load.num_unloads)


class Collector(Families):
    """One sample of the metrics of a model: of its ring, and of its answers by HTTP.

    Args:
        model: name of the model.
        info: the ring's info, empty if the ring does not answer.
        num_open: number of web requests that the model is answering.
        answers: counts and times of the answers.
        is_only: the server has no other model.
    """

    def __init__(
        self,
        model: str,
        info: dict[str, Any],
        num_open: int,
        answers: AnswerMetrics,
        is_only: bool = True,
    ) -> None:
        super().__init__(model)
        self._info = info
        self._num_open = num_open
        self._answers = answers
        self._is_only = is_only

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        yield self.gauge(
            "http_requests_live", "Number of web requests that are being answered", self._num_open
        )
        if self._info.get("replicas"):
            yield from self._replicas()
        elif self._info.get("ready"):
            yield from self._ring(self._info)
        pids, of = self._info.get("pids", {}), {}
        if not self._is_only:
            of = {"model_name": self._model}
            pids = {name: pid for name, pid in pids.items() if name != LAUNCHER}
        yield from of_processes(pids, of)
        for name, histogram in self._answers.histograms.items():
            text = f"{HISTOGRAMS[name][1]}, of requests by HTTP"
            yield self.histogram(name, text, {(): histogram.as_map()})
        text = "Number of texts that were answered with numbers: a vector, scores or probabilities"
        yield self.counter("http_vectors", text, self._answers.num_vectors)

    def _adapters(self, adapters: dict[str, Any]) -> Iterator[Metric]:
        """Yield the metrics of the adapters, the first one as vLLM has it."""
        labels = {
            "max_lora": str(adapters["max"]),
            "running_lora_adapters": ",".join(adapters["running"]),
            "waiting_lora_adapters": ",".join(adapters["waiting"]),
        }
        text = "Unix time of this sample, with the adapters that have running and waiting requests"
        family = GaugeMetricFamily(
            PREFIX + "lora_requests_info", text, labels=["model_name", *labels]
        )
        family.add_metric([self._model, *labels.values()], wall_seconds())
        yield family
        text = "Number of times that the worker has loaded an adapter"
        yield self.counter("adapter_loads", text, adapters["loads"])
        text = "Number of loads of adapters that were in memory, so that no files were read"
        yield self.counter("adapter_memory_loads", text, adapters["memory_loads"])
        text = "Number of adapters in the worker's memory"
        yield self.gauge("num_adapters_in_memory", text, len(adapters["in_memory"]))
        text = "Seconds that loads of adapters took, beside the steps"
        yield self.counter("adapter_load_seconds", text, adapters["load_seconds"])

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
        yield self.counter(
            "requests_moved",
            "Number of requests that went on at another replica",
            self._info["requests_moved"],
        )
        yield self.counter(
            "results_dropped",
            "Number of results of replicas that no longer owned the request",
            self._info["results_dropped"],
        )
        if "requests_handed_over" in self._info:
            yield self.counter(
                "requests_handed_over",
                "Number of choices that went on at another replica when their prompt was computed",
                self._info["requests_handed_over"],
            )
        if "prefill_replicas" in self._info:
            yield self.gauge(
                "prefill_replicas",
                "Number of replicas that compute prompts for the others: the first ones",
                self._info["prefill_replicas"],
            )
            yield self.counter(
                "role_changes",
                "Number of times that this number has changed",
                self._info["role_changes"],
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
            yield self.gauge(name, text, derived[name] if not key else info[key])
        for name, (key, text) in COUNTERS.items():
            yield self.counter(name, text, info[key])
        yield from self._adapters(info["adapters"])
        yield self.counter(
            "nan_logits",
            "Number of choices that ended because the model's logits were not finite",
            info["errors"].get(NonFiniteLogits.code, 0),
        )
        if "cache_pins" in info:
            yield from self._pins(info)
        if SPECULATION_BY_PLACE in info:
            yield from self._speculation(info)
        if "kv_offload_pages" in info:
            yield from self._offload(info)
        for name, text, label, key in LABELED_COUNTERS:
            yield self.labeled(name, text, label, info[key])
        for index, (name, text) in enumerate(TENANT_COUNTERS if info.get("tenants") else ()):
            counts = {tenant: numbers[index] for tenant, numbers in info["tenants"].items()}
            yield self.labeled(name, text, "tenant", counts)
        text = "Number of tokens that one step computes"
        yield self.histogram("iteration_tokens_total", text, {(): info["step_tokens"]})
        text = "Seconds that a request spends in each stage, by HTTP or ZeroMQ"
        stages: dict[tuple[str, ...], dict[str, float]] = {
            (stage,): times for stage, times in info["stage_seconds"].items()
        }
        yield self.histogram("per_stage_req_latency_seconds", text, stages, "stage")
        pool = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "Always 1; the labels describe the KV pool",
            labels=["model_name", *POOL_LABELS],
        )
        pool.add_metric([self._model, *(str(info[key]) for key in POOL_LABELS.values())], 1)
        yield pool

    def _pins(self, info: dict[str, Any]) -> Iterator[Metric]:
        """Yield the metrics of cached prefixes that requests ask to keep."""
        for name, text in PIN_GAUGES.items():
            yield self.gauge(name, text, info[name])
        for name, text in PIN_COUNTERS.items():
            yield self.counter(name, text, info[f"{name}_total"])

    def _speculation(self, info: dict[str, Any]) -> Iterator[Metric]:
        """Yield the metrics of guessed tokens."""
        for name, text in SPECULATION_COUNTERS.items():
            yield self.counter(name, text, info[f"{name}_total"])
        text = "Number of guessed tokens that were right, by their place in the row"
        places = info[SPECULATION_BY_PLACE]
        yield self.labeled(SPECULATION_BY_PLACE, text, "position", places)

    def _offload(self, info: dict[str, Any]) -> Iterator[Metric]:
        """Yield the metrics of KV pages beyond the pool."""
        for name, text in OFFLOAD_GAUGES.items():
            yield self.gauge(name, text, info[name])
        for name, (key, text) in OFFLOAD_COUNTERS.items():
            yield self.counter(name, text, info[key])
        for name, (key, text) in TRANSFER_COUNTERS.items():
            if key in info:
                yield self.counter(name, text, info[key])


def of_processes(pids: Mapping[str, int], of: Mapping[str, str] = {}) -> Iterable[Metric]:
    """Return CPU time, memory and start of each process that runs on this machine.

    Args:
        pids: by name.
        of: labels beside that of the process.
    """
    labels = [*of, "process"]
    cpu = CounterMetricFamily(
        PREFIX + "process_cpu_seconds", "CPU time of the process in seconds", labels=labels
    )
    memory = GaugeMetricFamily(
        PREFIX + "process_resident_bytes",
        "Resident memory of the process in bytes",
        labels=labels,
    )
    started = GaugeMetricFamily(
        PREFIX + "process_start_time_seconds",
        "Start of the process in Unix time; it changes with a restart",
        labels=labels,
    )
    for name, pid in pids.items():
        values = [*of.values(), name]
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            memory.add_metric(values, process.memory_info().rss)
            started.add_metric(values, process.create_time())
            cpu.add_metric(values, times.user + times.system)
        except psutil.Error:
            continue
    return cpu, memory, started


def of_tenant(make: Families, tenant: str, usage: Sequence[float]) -> Iterator[Metric]:
    """Yield what a tenant has used, which is all that its own key shows.

    Args:
        make: makes the families.
        tenant: name of the tenant.
        usage: the numbers of TENANT_COUNTERS; empty without any.
    """
    for (name, text), count in zip(TENANT_COUNTERS, usage, strict=False):
        yield make.labeled(name, text, "tenant", {tenant: count})


def merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Return each family once, with the samples of all families of its name."""
    found: dict[str, Metric] = {}
    for family in families:
        first = found.setdefault(family.name, family)
        if first is not family:
            first.samples += family.samples
    return found.values()


class Exposition(NamedTuple):
    """All families of one answer, as a collector of the library."""

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self.families


async def metrics(request: web.Request) -> web.Response:
    """Return all metrics, without those of a model's ring that does not answer.

    A tenant's key gets those of the tenant's own usage.
    """
    gateway = request.app[exchange.GATEWAY]
    models = gateway.models
    answers = await models.each(lambda model: model.server_info.current())
    infos = [{} if isinstance(answer, QuadrigaError) else answer for answer in answers]
    of_each = list(zip(models, infos, strict=True))
    if (entry := current_caller().entry) is not None:
        return _exposed(
            chain.from_iterable(
                of_tenant(
                    Families(model.name),
                    entry.name,
                    (info.get("tenants") or {}).get(entry.name, ()),
                )
                for model, info in of_each
            )
        )
    rings = [
        Collector(model.name, info, gateway.num_open_of(model), model.answers, len(models) == 1)
        for model, info in of_each
    ]
    default = models.default.name
    make = Families(default)
    has_failed = None if gateway.tenant_file is None else gateway.tenant_file.has_failed
    pids: dict[str, int] = {}
    if len(models) > 1:  # of a single model they are among its processes
        for info in infos:
            pids |= {name: pid for name, pid in info.get("pids", {}).items() if name == LAUNCHER}
    return _exposed(
        chain(
            chain.from_iterable(ring.collect() for ring in rings),
            chain.from_iterable(of_load(Families(model.name), model.load) for model in models),
            of_gateway(default, gateway.metrics, pids, has_failed),
            of_gen_ai(gateway.gen_ai),
            of_batches(make, gateway[BATCHES]),
            of_responses(make, gateway.get(RESPONSE_STORE)),
            of_streams(make, gateway[STREAMS], gateway[STREAM_ROWS]),
            of_traces(make, [*infos, gateway.traces.info()]),
        )
    )


def _exposed(families: Iterable[Metric]) -> web.Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exposition(merged(families)))
    return web.Response(
        body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
    )
