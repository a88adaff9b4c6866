"""Traces of a real ring: contiguous over a retraction and kills, and exported to a collector."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.client.server import free_port
from quadriga.client import AsyncClient, SamplingParams
from quadriga.wire.trace import RequestTrace
from tests.server import Server, running_server, wait_until
from tests.unit.server.tracing.collector import Collector, attributes_of, running_collector

STREAMS = 6
MAX_TOKENS = 150
# The pool holds about half of the tokens of all streams, so that some are retracted.
POOL = ["--max-total-tokens", "512", "--page-size", "16", "--schedule-conservativeness", "0.01"]
PARENT_ID = "b7ad6b7169203331"
TIMEOUT_S = 60.0
PROCESSES = {"http_proc", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc"}


class Traced(NamedTuple):
    """A server with a small KV pool that exports to a collector."""

    server: Server
    collector: Collector
    url: str


@pytest.fixture(scope="module")
def traced(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    port = free_port()
    with running_collector() as collector:
        flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
        flags += ["--port", str(port), "--otlp-endpoint", collector.url, "--max-restarts", "100"]
        flags += ["--trace-sampling-ratio", "0", *POOL]
        with running_server(tmp_path_factory.mktemp("traces") / "log", *flags) as server:
            yield Traced(server, collector, f"http://127.0.0.1:{port}")


def traceparent(number: int) -> str:
    return f"00-{number + 1:032x}-{PARENT_ID}-01"


def complete(url: str, number: int, prompt: str = "The quick brown fox") -> None:
    """Run a traced request with the X-Request-Id `r` and its number."""
    body = {"prompt": f"{number} {prompt}", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    headers = {"traceparent": traceparent(number), "X-Request-Id": f"r{number}"}
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert answer.headers["traceparent"].startswith(traceparent(number)[:36])
        answer.read()


def trace_of(url: str, name: str) -> list[dict[str, Any]]:
    """Return the complete and the instant events of a trace, and check that they are contiguous."""
    with urllib.request.urlopen(f"{url}/v1/requests/{name}/trace", timeout=TIMEOUT_S) as answer:
        events: list[dict[str, Any]] = json.load(answer)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    own = spans[0]
    phases = [span for span in spans[1:] if span["name"] not in ("llm_request", "forward")]
    phases.sort(key=lambda span: (span["ts"], span["ts"] + span["dur"]))
    for phase, following in pairwise(phases):
        assert abs(phase["ts"] + phase["dur"] - following["ts"]) < 100, "µs"
    assert abs(sum(phase["dur"] for phase in phases) - own["dur"]) < 1000, "1 ms"
    return spans + [event for event in events if event["ph"] == "i"]


def names_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events]


async def run_all(url: str, first: int) -> None:
    await asyncio.gather(
        *(asyncio.to_thread(complete, url, first + number) for number in range(STREAMS))
    )


def test_a_trace_has_the_retraction_and_every_export_is_understood(traced: Traced) -> None:
    # On a busy machine the first requests may have ended before the last ones begin.
    for first in range(1000, 6000, 1000):
        asyncio.run(run_all(traced.url, first))
        traces = [trace_of(traced.url, f"r{first + number}") for number in range(STREAMS)]
        retracted = [i for i, events in enumerate(traces) if "retracted" in names_of(events)]
        if retracted:
            break
    assert retracted, "a pool of half the tokens was enough"
    events = traces[retracted[0]]
    names = names_of([event for event in events if event["ph"] == "X"])
    assert names.count("queue") >= 2
    assert names.count("prefill") >= 2
    assert {event["cat"] for event in events} == PROCESSES
    waits = {event["args"]["reason"] for trace in traces for event in trace
             if event["name"] == "waits"}  # fmt: skip
    assert "pages" in waits

    wanted = {"/v1/completions", "llm_request", "queue", "prefill", "forward", "decode"}
    spans = traced.collector.of_trace(f"{first + retracted[0] + 1:032x}", wanted | {"detokenize"})
    by_name = {span["name"]: span for span in spans}
    web, ring = by_name["/v1/completions"], by_name["llm_request"]
    assert web["parentSpanId"] == PARENT_ID
    assert ring["parentSpanId"] == web["spanId"]
    assert by_name["detokenize"]["parentSpanId"] == ring["spanId"]
    assert attributes_of(ring)["quadriga.retractions"] >= 1
    own = attributes_of(web)
    assert own["gen_ai.operation.name"] == "text_completion"
    assert own["gen_ai.response.finish_reasons"] == ["length"]
    assert own["gen_ai.usage.output_tokens"] == MAX_TOKENS
    assert "gen_ai.operation.name" not in attributes_of(ring), "a request counts once"
    assert {span["process"] for span in spans} == PROCESSES
    with urllib.request.urlopen(f"{traced.url}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    assert "quadriga:otlp_traces_dropped_total{model_name=" in text


@pytest.mark.parametrize(
    ("process", "name"),
    [
        ("worker_proc", "worker restart"),
        ("scheduler_proc", "scheduler restart"),
        ("detok_proc", "detokenizer ready"),
        ("tokenizer_proc", "frontend ready"),
    ],
)
def test_a_trace_goes_on_when_a_process_is_killed(traced: Traced, process: str, name: str) -> None:
    traces = asyncio.run(traces_with_a_kill(traced.server, process))
    assert len(traces) == STREAMS
    for trace in traces:
        phases = [span for span in trace.spans if span.parent < 0]
        for phase, following in pairwise(phases):
            assert phase.ended_at == following.began_at
        seconds = sum(phase.ended_at - phase.began_at for phase in phases)
        assert abs(seconds - (trace.ended_at - trace.began_at)) < 0.001
        assert [phases[0].name, phases[-2].name] == ["tokenize", "detokenize"]
        assert phases[-1].name == "deliver"
    found = {span.name for trace in traces for span in trace.spans}
    found |= {event.name for trace in traces for span in trace.spans for event in span.events}
    # The requests may have ended before the new process was there.
    is_replayed = any("quadriga.replayed" in trace.attributes for trace in traces)
    assert name in found or (name.endswith("ready") and is_replayed)


async def traces_with_a_kill(server: Server, process: str) -> list[RequestTrace]:
    """Kill a process while traced requests stream. Return their traces."""
    params = SamplingParams(temperature=0, max_new_tokens=MAX_TOKENS, ignore_eos=True)
    started = asyncio.Event()
    async with AsyncClient(server.endpoint) as client:

        async def stream(number: int) -> str:
            async for chunk in client.stream(
                [3 + number] * 8, params, traceparent=traceparent(number)
            ):
                if chunk.token_ids:
                    started.set()
            return chunk.request_id

        tasks = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        await started.wait()
        pid = server.pid_of(process)
        os.kill(pid, signal.SIGKILL)
        ids = await asyncio.gather(*tasks)
        wait_until(lambda: server.pid_of(process) not in (0, pid), TIMEOUT_S)
        return await client.traces(list(ids))


def test_a_collector_that_is_gone_delays_no_request(traced: Traced) -> None:
    traced.collector.statuses = [503] * 1000
    try:
        asyncio.run(run_all(traced.url, 100))
        trace_of(traced.url, "r100")
    finally:
        traced.collector.statuses = []
    # The SDK gives a batch up after six tries, so those of the first requests may be lost.
    complete(traced.url, 200)
    traced.collector.of_trace(f"{201:032x}", {"llm_request"})
