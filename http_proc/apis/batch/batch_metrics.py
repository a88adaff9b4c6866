"""Metrics of batches."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from http_proc.apis.batch.service import BatchService

PREFIX = "quadriga:"


class BatchCollector:
    """One sample of the metrics of batches and files."""

    def __init__(self, model: str, service: BatchService) -> None:
        self._model = model
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        states = GaugeMetricFamily(
            PREFIX + "batches", "Number of batches by their state", labels=["model_name", "status"]
        )
        for status, count in self._service.num_by_status().items():
            states.add_metric([self._model, status], count)
        yield states
        lines = CounterMetricFamily(
            PREFIX + "batch_lines",
            "Number of lines of batches by their outcome: completed or failed",
            labels=["model_name", "outcome"],
        )
        for outcome in ("completed", "failed"):
            lines.add_metric([self._model, outcome], self._service.num_lines[outcome])
        yield lines
        size = GaugeMetricFamily(
            PREFIX + "stored_file_bytes", "Size of all stored files in bytes", labels=["model_name"]
        )
        size.add_metric([self._model], self._service.files.num_bytes)
        yield size
