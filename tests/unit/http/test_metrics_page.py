"""docs/metrics.md lists the metrics of GET /metrics: their names, kinds and labels."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from prometheus_client.core import Metric

from http_proc.apis.responses.stored_responses import StoredResponses
from http_proc.core.gen_ai import GEN_AI, GenAiLabels, GenAiMetrics
from http_proc.core.observe import AnswerMetrics, RequestMetrics
from http_proc.page.metrics import (
    PREFIX,
    TENANT_COUNTERS,
    TRACE_COUNTERS,
    Collector,
    Families,
    merged,
    of_batches,
    of_gateway,
    of_gen_ai,
    of_load,
    of_responses,
    of_streams,
    of_traces,
)
from quadriga.server.model_list import ModelLoad
from tests.unit.http.server_info import info_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
# Labels of every family, which the page names once, above its tables.
COMMON_LABELS = {"model_name", "replica"}
KINDS = {"C": "counter", "G": "gauge", "H": "histogram"}


class AnyNumber:
    """An object each of whose attributes is 1."""

    def __getattr__(self, name: str) -> int:
        """Return 1."""
        return 1

    def __len__(self) -> int:
        """Return 1."""
        return 1


def whole_info() -> dict[str, Any]:
    """Return the info of a server that guesses, has KV tiers, roles and tenants, and has failed."""
    ring = {
        **info_of(stored=b"1" * 16, fetches=True),
        "tenants": {"alice": [1.0] * len(TENANT_COUNTERS)},
        "ended": {"stop": 1},
        "aborts": {"client": 1},
        "errors": {"failed": 1},
        "spec_decode_num_drafts_total": 1,
        "spec_decode_num_draft_tokens_total": 1,
        "spec_decode_num_accepted_tokens_total": 1,
        "spec_decode_num_accepted_tokens_per_pos": {"0": 1},
        "stage_seconds": dict.fromkeys(("queue",), info_of()["step_tokens"]),
    }
    replicas = [{"replica": number, **ring} for number in range(2)]
    return {
        **ring,
        "replicas": replicas,
        "num_replicas": 2,
        "requests_moved": 1,
        "results_dropped": 1,
        "requests_handed_over": 1,
        "prefill_replicas": 1,
        "role_changes": 1,
    }


def families() -> Iterator[Metric]:
    """Yield every family that the gateway can expose."""
    make = Families("m")
    http = RequestMetrics()
    http.errors["m", "failed"] += 1
    batches: Any = SimpleNamespace(
        num_by_status=lambda: {"completed": 1},
        num_lines={"completed": 1, "failed": 1},
        files=AnyNumber(),
    )
    store = Mock(
        spec=StoredResponses, size=AnyNumber(), has_failed=True, outcomes={"stored": 1, "failed": 1}
    )
    any_number: Any = AnyNumber()
    gen_ai = GenAiMetrics()
    for name in GEN_AI:
        gen_ai.observe(name, GenAiLabels("chat", "quadriga", "m", "m", ""), 1.0)
    exporter = {key: 1 for key, _ in TRACE_COUNTERS.values()}
    return chain(
        Collector("m", whole_info(), 1, AnswerMetrics()).collect(),
        of_load(make, ModelLoad("loaded")),
        of_gateway("m", http, {}, key_file_failed=True),
        of_gen_ai(gen_ai),
        of_batches(make, batches),
        of_responses(make, store),
        of_streams(make, any_number, any_number),
        of_traces(make, [exporter]),
    )


def exposed() -> dict[str, tuple[str, frozenset[str]]]:
    """Return kind and labels of each metric, by its name on the page."""
    found = {}
    for family in merged(families()):
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels - COMMON_LABELS))
    return found


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Return kind and labels of each metric of the page's tables."""
    found = {}
    for names, kinds in re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \| ([CGH](?:, [CGH])*) \|",
                                   PAGE.read_text(), re.M):  # fmt: skip
        metrics = re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", names)
        letters = kinds.split(", ")
        letters = letters if len(letters) == len(metrics) else letters * len(metrics)
        for (name, labels), letter in zip(metrics, letters, strict=True):
            found[name] = (KINDS[letter], frozenset(filter(None, labels.split(","))))
    return found


def test_the_page_lists_every_metric_with_its_kind_and_labels() -> None:
    on_page, in_code = documented(), exposed()
    # Of several replicas the label is common; the gauge of the replicas themselves names it.
    on_page["replica_up"] = ("gauge", on_page["replica_up"][1] - COMMON_LABELS)
    assert sorted(on_page) == sorted(in_code)
    assert {name: fact for name, fact in on_page.items() if fact != in_code[name]} == {}
