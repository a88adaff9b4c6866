"""The dashboard and the alert rules name metrics and labels of a running server."""

import json
import re
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from tests.gateway import running_gateway
from tests.server import ROOT, Server

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
# Labels that Prometheus adds, and those of its own metrics.
ADDED_LABELS = {"instance", "job", "le"}
# Families without a sample until the first error, and the label that they have then.
EMPTY_FAMILIES = {"quadriga:http_errors_total": "code", "quadriga:request_errors_total": "code"}


def samples(text: str) -> dict[str, set[str]]:
    """Return the labels of each metric by its name in the exposition."""
    labels: dict[str, set[str]] = defaultdict(set)
    for name, shown in re.findall(r"^(quadriga:\w+)\{([^}]*)\}", text, re.M):
        labels[name] |= set(re.findall(r"(\w+)=", shown))
    for name, label in EMPTY_FAMILIES.items():
        assert f"# TYPE {name.removesuffix('_total')}_total counter" in text
        labels[name] |= {"model_name", label}
    return labels


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    alerts = re.split(r"\n *- alert: ", ALERTS.read_text())[1:]
    return found + [
        re.split(r"\n +(?:for|labels):", alert.split("expr:")[1])[0] for alert in alerts
    ]


def labels_of(query: str) -> set[str]:
    """Return the labels that a query selects and groups by."""
    selected = re.findall(r"(\w+) *(?:=~|!~|!=|=)\"", query)
    grouped = re.findall(r"\b(?:by|on) *\(([^)]*)\)", query)
    return set(selected) | {name.strip() for names in grouped for name in names.split(",")}


@pytest.fixture(scope="module")
def metrics(server: Server, llama_dir: Path) -> dict[str, set[str]]:
    with running_gateway(server.endpoint, llama_dir) as url:
        body = json.dumps({"prompt": "The quick", "max_tokens": 4}).encode()
        urllib.request.urlopen(f"{url}/v1/completions", body, timeout=30).read()
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            return samples(answer.read().decode())


def test_every_name_and_label_is_that_of_a_metric(metrics: dict[str, set[str]]) -> None:
    assert len(queries()) > 40
    for query in queries():
        names = re.findall(r"quadriga:\w+", query)
        assert names or query.strip().startswith("up{"), query
        known = set().union(*(metrics.get(name, set()) for name in names)) | ADDED_LABELS
        assert not [name for name in names if name not in metrics], query
        assert labels_of(query) <= known, query
        assert all(query.count(a) == query.count(b) for a, b in ("()", "[]", "{}")), query


def test_a_wrong_label_and_a_wrong_name_are_found(metrics: dict[str, set[str]]) -> None:
    assert labels_of('sum by (stage, no_such) (x{color="red"})') == {"stage", "no_such", "color"}
    assert "quadriga:no_such_total" not in metrics
    assert "stage" in metrics["quadriga:per_stage_req_latency_seconds_sum"]
