"""Metrics of resumable streams."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from http_proc.streams.stream_rows import StreamRows
from http_proc.streams.stream_table import StreamTable

PREFIX = "quadriga:"


class StreamCollector:
    """One sample of the metrics of resumable streams."""

    def __init__(self, model: str, table: StreamTable, rows: StreamRows) -> None:
        self._model = model
        self._table = table
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        table = self._table
        gauges = (
            ("resumable_streams", "Number of resumable streams that are kept", len(table)),
            (
                "resumable_stream_bytes",
                "Size of their events and requests in bytes",
                table.num_bytes,
            ),
            (
                "resumable_rows_failed",
                "1 while the file of resumable streams cannot be written, else 0",
                int(self._rows.has_failed),
            ),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        counters = (
            ("streams_resumed", "Number of times that a stream was read again", table.num_resumed),
            (
                "streams_expired",
                "Number of streams that ended because no client has read them in time",
                table.num_expired,
            ),
        )
        for name, text, count in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], count)
            yield counter
