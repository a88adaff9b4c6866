"""The metrics of several replicas have the label `replica`, and those of one have not."""

import re
from typing import Any

from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest

from http_proc.core.observe import AnswerMetrics
from http_proc.page.metrics import Collector
from tests.unit.http.server_info import info_of


def text_of(info: dict[str, Any]) -> list[str]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector("m", info, 0, AnswerMetrics()))
    return generate_latest(registry).decode().splitlines()


def test_every_metric_of_the_ring_names_its_replica_once() -> None:
    replicas = [{"replica": number, **info_of()} for number in (0, 2)]
    text = text_of(
        {
            **info_of(),
            "replicas": replicas,
            "num_replicas": 3,
            "requests_moved": 7,
            "results_dropped": 5,
        }
    )
    for number in (0, 2):
        assert f'quadriga:steps_total{{model_name="m",replica="{number}"}} 0.0' in text
        assert f'quadriga:replica_up{{model_name="m",replica="{number}"}} 1.0' in text
    assert 'quadriga:replica_up{model_name="m",replica="1"} 0.0' in text
    assert 'quadriga:requests_moved_total{model_name="m"} 7.0' in text
    assert 'quadriga:results_dropped_total{model_name="m"} 5.0' in text
    helps = [line for line in text if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    alone = {line.split()[2] for line in text_of(info_of()) if line.startswith("# HELP")}
    several = {line.split()[2] for line in helps}
    assert several - alone == {
        "quadriga:replica_up", "quadriga:requests_moved_total", "quadriga:results_dropped_total",
    }  # fmt: skip
    assert alone <= several


def test_a_replica_without_a_worker_is_not_up_and_one_alone_has_no_label() -> None:
    replicas = [{"replica": 0, **info_of()}, {"replica": 1, **info_of(ready=False)}]
    text = text_of(
        {
            **info_of(),
            "replicas": replicas,
            "num_replicas": 2,
            "requests_moved": 0,
            "results_dropped": 0,
        }
    )
    assert 'quadriga:replica_up{model_name="m",replica="1"} 0.0' in text
    assert not any('replica="' in line for line in text_of(info_of()))


def test_pages_beyond_the_pool_have_metrics_where_there_are_any() -> None:
    tiered = text_of(info_of(stored=bytes(16)))
    assert 'quadriga:kv_offload_pages{model_name="m"} 1.0' in tiered
    assert 'quadriga:kv_offload_disk_failed{model_name="m"} 0.0' in tiered
    assert 'quadriga:external_prefix_cache_hits_total{model_name="m"} 0.0' in tiered
    assert not any("kv_offload" in line or "external" in line for line in text_of(info_of()))


def test_the_labels_of_the_pool_have_the_names_that_routers_look_for() -> None:
    (line,) = (
        line for line in text_of(info_of()) if line.startswith("quadriga:cache_config_info{")
    )
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
    assert labels["block_size"] == labels["page_size"] == str(info_of()["page_size"])
    assert labels["num_gpu_blocks"] == labels["num_pages"] == str(info_of()["pages_total"])
