"""Metrics of the export of traces."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric

# Metric name -> (key of an exporter's info, help text).
COUNTERS = {
    "otlp_traces_exported": (
        "traces_exported",
        "Number of traces that the OTLP collector has taken, those of gateway and server apart",
    ),
    "otlp_traces_dropped": (
        "traces_dropped",
        "Number of traces that the OTLP collector has not taken in time",
    ),
}


class TraceCollector:
    """One sample of the counters of all exporters; without --otlp-endpoint there are none."""

    def __init__(self, model: str, infos: Sequence[Mapping[str, Any]]) -> None:
        self._model = model
        self._infos = infos

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        for name, (key, text) in COUNTERS.items():
            counts = [info[key] for info in self._infos if key in info]
            if counts:
                family = CounterMetricFamily("quadriga:" + name, text, labels=["model_name"])
                family.add_metric([self._model], sum(counts))
                yield family
