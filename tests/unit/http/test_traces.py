"""Traces at the gateway: traceparent in and out, who sees what, and `quadriga trace`."""

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from http_proc.core import observe
from http_proc.core.gateway import Gateway
from quadriga.errors import RequestFailed
from quadriga.server.cli.main import EXIT_FAILED, EXIT_OK, main
from quadriga.wire.live import RowKind
from quadriga.wire.trace import RequestTrace, Span, TraceContext
from tests.unit.http.calls import Answer, key_file, send
from tests.unit.live_messages import make_step
from tests.unit.scripted_ring import ScriptedRing, gateway_before
from tests.unit.server.tracing.spans import ended

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
    "/generate": {"text": "a"},
    "/api/generate": {"model": "tiny", "prompt": "a", "stream": False},
}


class TracedRing(ScriptedRing):
    """A ring that has a trace of each of its requests."""

    async def traces(self, request_ids: list[str]) -> list[RequestTrace]:
        return [
            RequestTrace(
                TraceContext(TRACE_ID, f"{number + 1:016x}"), "llm_request", name, 0,
                [Span("tokenize", "tokenizer_proc", 2e9, 2e9 + 1)],
            )
            for number, name in enumerate(request_ids)
        ]  # fmt: skip


async def ask(
    gateway: Any, path: str = "/v1/completions", body: Any = None, **headers: str
) -> Answer:
    return await send(gateway, path, BODIES[path] if body is None else body, **headers)


async def trace_of(gateway: Any, name: str, **headers: str) -> tuple[int, Any]:
    answer = await send(gateway, f"/v1/requests/{name}/trace", **headers)
    return answer.status, answer.body


def parents(ring: ScriptedRing) -> list[str]:
    return [options.get("traceparent", "") for _, _, options in ring.submitted]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_takes_a_traceparent_and_answers_with_its_own(
    path: str, stream: bool
) -> None:
    ring = TracedRing(["a"])
    async with gateway_before(ring) as (_, gateway):
        body = BODIES[path] | ({"stream": True} if stream else {})
        response = await ask(gateway, path, body, traceparent=TRACEPARENT)
        assert response.status == 200
        (sent,) = parents(ring)
        assert response.headers["traceparent"] == sent
        version, trace_id, span_id, flags = sent.split("-")
        assert (version, trace_id, flags) == ("00", TRACE_ID, "01")
        assert span_id != "b7ad6b7169203331"


async def test_every_request_is_kept_by_default_and_callers_learn_of_sampled_ones_alone() -> None:
    ring = TracedRing(["a"])
    async with gateway_before(ring) as (_, gateway):
        for number, flags in enumerate(["", TRACEPARENT[:-1] + "0", TRACEPARENT]):
            response = await ask(gateway, X_Request_Id=f"x{number}", traceparent=flags)
            assert ("traceparent" in response.headers) == (flags == TRACEPARENT)
            assert (await trace_of(gateway, f"x{number}"))[0] == 200
    assert [parent.split("-")[3] for parent in parents(ring)] == ["00", "00", "01"]


async def test_with_keep_traces_sampled_nothing_is_traced_without_a_sampled_traceparent() -> None:
    ring = TracedRing(["a"])
    async with gateway_before(ring, keep_traces="sampled") as (_, gateway):
        for headers in ({}, {"traceparent": "nonsense"}, {"traceparent": TRACEPARENT[:-1] + "0"}):
            response = await ask(gateway, X_Request_Id="x", **headers)
            assert "traceparent" not in response.headers
        status, answer = await trace_of(gateway, "x")
        assert status == 404
        assert "--keep-traces all" in answer["error"]["message"]
    assert parents(ring) == ["", "", ""]


async def test_with_a_ratio_of_one_every_request_begins_a_trace() -> None:
    ring = TracedRing(["a"])
    async with gateway_before(ring, trace_sampling_ratio=1.0) as (_, gateway):
        answers = [await ask(gateway) for _ in range(3)]
        assert [answer.headers["traceparent"] for answer in answers] == parents(ring)
    assert len({parent.split("-")[1] for parent in parents(ring)}) == 3


async def test_a_request_of_the_same_connection_does_not_inherit_a_trace() -> None:
    ring = TracedRing(["a"])
    async with gateway_before(ring, keep_traces="sampled") as (_, gateway):
        url = f"{gateway.args.url}/v1/completions"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for headers in ({"traceparent": TRACEPARENT}, {}):
                async with session.post(url, json={"prompt": "a"}, headers=headers) as response:
                    await response.read()
    assert [bool(parent) for parent in parents(ring)] == [True, False]


async def test_a_trace_is_found_by_the_id_of_the_answer_and_by_its_x_request_id() -> None:
    async with gateway_before(TracedRing(["a"]), keep_traces="all") as (_, gateway):
        await ask(gateway, X_Request_Id="x1", body={"prompt": ["a", "b"]})
        for name in ("x1", "cmpl-x1"):
            status, trace = await trace_of(gateway, name)
            assert status == 200
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert {event["tid"] for event in events} == {1, 2, 3}, "the web request and two prompts"
        own = events[0]
        assert own["name"] == "/v1/completions"
        assert own["args"]["http.response.status_code"] == 200
        assert own["args"]["quadriga.choices"] == 2
        assert trace["otherData"]["request_id"] == "cmpl-x1"
        for name in ("x2", "x1%2F..", "x" * 5000):
            assert (await trace_of(gateway, name))[0] == 404


async def test_a_tenant_sees_the_traces_of_its_own_requests_only(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice="alice", bob="bob")
    async with gateway_before(
        TracedRing(["a"]), keys=str(keys), api_key="admin", trace_sampling_ratio=1.0
    ) as (_, gateway):
        await ask(gateway, X_Request_Id="x1", Authorization="Bearer alice")
        status, trace = await trace_of(gateway, "x1", Authorization="Bearer alice")
        assert status == 200
        own = next(event for event in trace["traceEvents"] if event["ph"] == "X")
        assert own["args"]["quadriga.tenant"] == "alice"
        assert (await trace_of(gateway, "x1", Authorization="Bearer bob"))[0] == 404
        assert (await trace_of(gateway, "x1", Authorization="Bearer admin"))[0] == 200
        assert (await trace_of(gateway, "x1"))[0] == 401


async def test_a_request_that_fails_or_is_refused_has_a_trace_with_its_error() -> None:
    ring = TracedRing(["a"])
    async with gateway_before(ring, trace_sampling_ratio=1.0) as (_, gateway):
        await ask(gateway, X_Request_Id="refused", body={"prompt": "a", "n": 0})
        ring.error = RequestFailed("the worker died")
        await ask(gateway, X_Request_Id="failed")
        for name, status in (("refused", 400), ("failed", 500)):
            _, trace = await trace_of(gateway, name)
            own = next(event for event in trace["traceEvents"] if event["ph"] == "X")
            assert own["args"]["http.response.status_code"] == status
            assert own["args"]["error"]


async def test_a_request_that_has_not_ended_says_so() -> None:
    ring = TracedRing(["a"])
    ring.leaves_open = True
    async with gateway_before(ring, trace_sampling_ratio=1.0) as (_, gateway):
        task = asyncio.create_task(ask(gateway, X_Request_Id="x1"))
        while not gateway.num_open:
            await asyncio.sleep(0.01)
        for name in ("x1", "cmpl-x1", ring.handles[0].request_id):
            status, answer = await trace_of(gateway, name)
            assert (status, answer["error"]["code"]) == (404, "request_not_ended")
        task.cancel()


async def test_the_command_writes_a_trace_to_a_file_and_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    async with gateway_before(TracedRing(["a"]), trace_sampling_ratio=1.0) as (_, gateway):

        def quadriga(*flags: str) -> int:
            return main(["trace", "--url", gateway.args.url, *flags])

        await ask(gateway, X_Request_Id="x1")
        assert await asyncio.to_thread(quadriga, "x1", "-o", str(path)) == EXIT_OK
        assert await asyncio.to_thread(quadriga, "x1") == EXIT_OK
        assert await asyncio.to_thread(quadriga, "x2") == EXIT_FAILED
        missing = str(tmp_path / "missing" / "file")
        assert await asyncio.to_thread(quadriga, "x1", "-o", missing) == EXIT_FAILED
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(path.read_text())
    assert "spans are in" in err
    assert "there is no trace of 'x2'" in err
    assert "cannot be written: No such file" in err


async def test_the_command_records_the_live_feed_for_some_seconds(tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    ring = TracedRing(["a"])

    async def feed() -> None:
        for number in count():
            ring.live.put_nowait(ended(make_step(number, {1: RowKind.DECODE}), number - 1))
            await asyncio.sleep(0.01)

    async with gateway_before(ring) as (_, gateway):
        feeding = asyncio.create_task(feed())
        flags = ["trace", "--live", "0.2s", "-o", str(path), "--url", gateway.args.url]
        assert await asyncio.to_thread(main, flags) == EXIT_OK
        feeding.cancel()
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event["args"]["step"] for event in events if event["name"] == "step"]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert len(steps) > 2


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "give the ID of a request, or --live 10s"),
        (["x1", "--live", "10s"], "give the ID of a request, or --live 10s"),
    ],
)
def test_an_id_or_a_time_is_needed(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *flags]) == EXIT_FAILED
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "10m", "1000s", "-1", "s"])
def test_a_time_that_cannot_work_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", f"--live={text}"])
    assert "it must be from 1s to 600s, such as 10s" in capsys.readouterr().err


async def recent(gateway: Gateway, query: str = "", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{gateway.args.url}/v1/requests{query}", headers=headers) as response,
    ):
        return response.status, await response.json()


async def names(gateway: Gateway, query: str = "", **headers: str) -> list[str]:
    return [one["request_id"] for one in (await recent(gateway, query, **headers))[1]["data"]]


async def test_the_recent_requests_are_listed_the_slowest_or_the_newest_first() -> None:
    ring = TracedRing(["a", "b"])
    async with gateway_before(ring) as (_, gateway):
        for number in range(3):
            await ask(gateway, X_Request_Id=f"x{number}", body={"prompt": ["a"] * (3 - number)})
        await ask(gateway, X_Request_Id="refused", body={"prompt": "a", "temperature": -1})
        assert await names(gateway, "?sort=newest") == ["x2", "x1", "x0"]
        status, answer = await recent(gateway)
        assert status == 200 and answer["keeps_all"] and not answer["has_more"]
        seconds = [one["seconds"] for one in answer["data"]]
        assert seconds == sorted(seconds, reverse=True)
        one = next(one for one in answer["data"] if one["request_id"] == "x0")
        assert (one["id"], one["route"], one["status"]) == ("cmpl-x0", "/v1/completions", 200)
        assert (one["choices"], one["prompt_tokens"], one["generated_tokens"]) == (3, 3, 6)
        assert one["decode_s"] == 0 and one["first_token_s"] > 0 and not one["is_running"]
        status, answer = await recent(gateway, "?sort=newest&limit=1")
        assert [one["request_id"] for one in answer["data"]] == ["x2"] and answer["has_more"]


async def test_a_request_that_runs_is_listed_with_its_time_so_far() -> None:
    ring = TracedRing(["a"])
    ring.leaves_open = True
    async with gateway_before(ring) as (_, gateway):
        url = f"{gateway.args.url}/v1/completions"
        body, headers = {"prompt": "a", "stream": True}, {"X-Request-Id": "open"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            await response.content.readany()
            (one,) = (await recent(gateway))[1]["data"]
            assert one["is_running"] and one["request_id"] == "open" and one["seconds"] > 0


@pytest.mark.parametrize(
    "query", ["sort=fast", "limit=0", "limit=501", "last_s=0", "last_s=x", "last_s=" + "9" * 5000]
)
async def test_a_query_that_cannot_be_names_the_field(query: str) -> None:
    async with gateway_before(TracedRing(["a"])) as (_, gateway):
        status, answer = await recent(gateway, f"?{query}")
        assert status == 400
        assert answer["error"]["param"] == query.partition("=")[0]


async def test_a_tenant_lists_its_own_requests_only(tmp_path: Path) -> None:
    flags = {"keys": key_file(tmp_path, alice="alice", bob="bob"), "api_key": "admin"}
    async with gateway_before(TracedRing(["a"]), **flags) as (_, gateway):
        await ask(gateway, X_Request_Id="x1", Authorization="Bearer alice")
        assert await names(gateway, Authorization="Bearer alice") == ["x1"]
        assert await names(gateway, Authorization="Bearer bob") == []
        (one,) = (await recent(gateway, Authorization="Bearer admin"))[1]["data"]
        assert one["tenant"] == "alice"


async def test_the_oldest_requests_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "MAX_KEPT_BYTES", 12_000)
    async with gateway_before(TracedRing(["a"])) as (_, gateway):
        for number in range(20):
            await ask(gateway, X_Request_Id=f"x{number}")
        await ask(gateway, X_Request_Id="x18")  # the same name again
        found = await names(gateway, "?sort=newest")
        assert 5 <= len(found) <= 7, "each takes its bytes, and those of its summary"
        assert found[:3] == ["x18", "x19", "x18"]
        assert (await trace_of(gateway, "x0"))[0] == 404
        assert (await trace_of(gateway, "x18"))[0] == 200
