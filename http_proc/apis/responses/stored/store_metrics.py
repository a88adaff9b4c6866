"""Metrics of stored responses."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from http_proc.apis.responses.store import ResponseStore
from http_proc.apis.responses.stored.response_store import StoredResponses

PREFIX = "quadriga:"


class ResponseStoreCollector:
    """One sample of the metrics of a store; none without a store."""

    def __init__(self, model: str, store: ResponseStore | None) -> None:
        self._model = model
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        store = self._store
        if not isinstance(store, StoredResponses):
            return
        for name, text, value in (
            ("stored_responses", "Number of stored responses", store.size.num_responses),
            ("stored_conversations", "Number of stored conversations",
             store.size.num_conversations),
            ("background_responses", "Number of responses that are made in the background",
             store.size.num_open),
            ("stored_response_bytes", "Bytes of the file of stored responses that are in use",
             store.size.num_bytes),
            ("response_store_failed", "1 while responses cannot be stored, else 0",
             int(store.has_failed)),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        saves = CounterMetricFamily(
            PREFIX + "response_saves",
            "Number of responses to be stored by the outcome: stored or failed",
            labels=["model_name", "outcome"],
        )
        for outcome in ("stored", "failed"):
            saves.add_metric([self._model, outcome], store.outcomes[outcome])
        yield saves
