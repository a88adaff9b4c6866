"""The exporter: batches, retries, and a collector that is gone."""

import importlib
import logging
import socket
import sys

import msgspec
import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.frontend_args import TraceArgs
from quadriga.server.tracing import otlp as exporter
from quadriga.server.tracing.export import NoExporter, make_exporter
from quadriga.server.tracing.otlp import OtlpExporter
from tests.unit.server.tracing.collector import running_collector
from tests.unit.server.tracing.spans import trace
from tests.waiting import wait_until

NUM_SPANS = 6  # of a trace
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"  # read by OpenTelemetry's exporter
ENCODED = msgspec.msgpack.encode(trace())


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "BATCH_DELAY_S", 0.01)


def test_traces_arrive_with_the_headers_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS_VARIABLE, "x-key=a%20b, x-other = 2")
    with running_collector() as collector:
        otlp = OtlpExporter(collector.url, {"service.name": "q"})
        for _ in range(3):
            otlp.put(ENCODED)
        collector.wait_for(3 * NUM_SPANS)
        otlp.close()
    assert otlp.info() == {"traces_exported": 3, "traces_dropped": 0}
    assert collector.headers["x-key"] == "a b"
    assert collector.headers["x-other"] == "2"
    assert set(collector.paths) == {"/v1/traces"}


def test_a_path_of_the_url_is_kept() -> None:
    with running_collector() as collector:
        otlp = OtlpExporter(f"{collector.url}/tenant/traces?token=1", {})
        otlp.put(ENCODED)
        collector.wait_for(NUM_SPANS)
        otlp.close()
    assert collector.paths == ["/tenant/traces?token=1"]


def test_a_busy_collector_is_asked_again_and_one_that_refuses_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_collector() as collector, caplog.at_level(logging.INFO):
        collector.statuses = [503, 429]
        otlp = OtlpExporter(collector.url, {})
        otlp.put(ENCODED)
        collector.wait_for(NUM_SPANS)
        collector.statuses = [400]
        otlp.put(ENCODED)
        wait_until(lambda: otlp.info()["traces_dropped"] == 1, 30)
        otlp.close()
    assert len(collector.paths) == 4
    assert otlp.info() == {"traces_exported": 1, "traces_dropped": 1}
    assert "does not take traces (Transient error Service Unavailable" in caplog.text
    assert caplog.text.count("does not take traces") == 2
    assert "Bad Request" in caplog.text
    assert "takes traces again" in caplog.text


def test_the_failures_of_one_exporter_are_logged_once_and_not_those_of_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_collector() as refusing, running_collector() as other:
        refusing.statuses = [400, 400]
        exporters = [OtlpExporter(collector.url, {}) for collector in (refusing, other)]
        for _ in range(2):
            for otlp in exporters:
                otlp.put(ENCODED)
            for otlp in exporters:
                wait_until(lambda otlp=otlp: sum(otlp.info().values()) >= 1, 30)  # type: ignore[misc]
        for otlp in exporters:
            otlp.close()
    assert caplog.text.count("does not take traces") == 1
    assert refusing.url in caplog.text
    assert other.url not in caplog.text


def test_what_does_not_fit_is_dropped_and_counted_without_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "MAX_WAITING", 4)
    monkeypatch.setattr(exporter, "CLOSE_TIMEOUT_S", 0.01)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        otlp = OtlpExporter(f"http://127.0.0.1:{closed.getsockname()[1]}", {})
        otlp.put(ENCODED)
        wait_until(lambda: "does not take traces" in caplog.text, 30)
        for _ in range(10):
            otlp.put(ENCODED)
        assert otlp.info() == {"traces_exported": 0, "traces_dropped": 6}
        otlp.close()
        wait_until(lambda: otlp.info() == {"traces_exported": 0, "traces_dropped": 11}, 30)
    assert caplog.text.count("does not take traces") == 1


def test_traces_that_wait_are_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "BATCH_DELAY_S", 60.0)
    with running_collector() as collector:
        otlp = OtlpExporter(collector.url, {})
        otlp.put(ENCODED)
        otlp.close()
        assert len(collector.spans) == NUM_SPANS


def test_without_an_endpoint_nothing_is_exported() -> None:
    nothing = make_exporter(TraceArgs(), "model")
    nothing.put(ENCODED)
    nothing.close()
    assert type(nothing) is NoExporter
    assert nothing.info() == {}


def test_without_the_extra_the_start_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, exporter.__name__)
    monkeypatch.delattr(importlib.import_module("quadriga.server.tracing"), "otlp")
    args = TraceArgs(otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"needs the package opentelemetry.*\[otlp\]"):
        make_exporter(args, "model")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"otlp_endpoint": "localhost:4317"}, "it must be a URL such as http://127.0.0.1:4318"),
        ({"otlp_endpoint": "grpc://localhost:4317"}, "gRPC, usually at port 4317, is not"),
        ({"otlp_endpoint": "http://localhost:99999"}, "otlp_endpoint is 'http://localhost:99999'"),
        ({"trace_sampling_ratio": 1.5}, "trace_sampling_ratio is 1.5: it must be from 0 to 1"),
        ({"trace_sampling_ratio": float("nan")}, "it must be from 0 to 1"),
    ],
)
def test_a_flag_that_cannot_work_is_refused_with_its_remedy(
    flags: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        TraceArgs(**flags).validate()  # type: ignore[arg-type]


def test_with_an_endpoint_every_request_is_sampled_unless_the_ratio_says_otherwise() -> None:
    url = "http://127.0.0.1:4318"
    assert TraceArgs().sampling_ratio == 0
    assert TraceArgs(otlp_endpoint=url).sampling_ratio == 1
    assert TraceArgs(otlp_endpoint=url, trace_sampling_ratio=0.0).sampling_ratio == 0
