"""--record: what is written of a call, what is not, and a disk that fails."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.agents.sessions import read_recording
from http_proc.core import recorder as recorder_module
from http_proc.core.gateway import Gateway
from http_proc.core.recorder import RECORDER, SessionRecorder, open_recorder
from quadriga.errors import ConfigError
from tests.unit.http.calls import key_file, send
from tests.unit.http.measured_ring import MeasuredRing
from tests.unit.scripted_ring import ScriptedRing, gateway_before
from tests.waiting import wait_until

SYSTEM = {"role": "system", "content": "You are an agent. " * 20}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
CHAT = "/v1/chat/completions"


def turn(number: int) -> list[dict[str, str]]:
    """Return what an agent's turn adds: the answer before, and what the tool said."""
    answer = {"role": "assistant", "content": f"I read file {number}."}
    return [answer, {"role": "user", "content": f"File {number} is empty."}]


def turns(number: int, task: str = "Find the bug.") -> list[dict[str, str]]:
    first = [SYSTEM, {"role": "user", "content": task}]
    return first + [message for n in range(1, number) for message in turn(n)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def recorded(gateway: Gateway) -> None:
    """Write what waits."""
    gateway[RECORDER].close()


async def run_agent(
    gateway: Gateway, num_turns: int, task: str = "Find the bug.", **headers: str
) -> list[dict[str, Any]]:
    """Let an agent take its turns. Return the bodies."""
    bodies = [
        {"messages": turns(number + 1, task), "tools": TOOLS, "model": "tiny", "user": "secret",
         "metadata": {"k": "secret"}}
        for number in range(num_turns)
    ]  # fmt: skip
    for body in bodies:
        answer = await send(gateway, CHAT, body, **headers)
        assert answer.status == 200, answer.text
    return bodies


async def test_what_is_read_back_is_what_the_agents_have_sent(tmp_path: Path) -> None:
    path = tmp_path / "record"
    async with gateway_before(MeasuredRing(), record=str(path)) as (_, gateway):
        open_recorder(gateway, is_restart=False)
        first = await run_agent(gateway, 5)
        other = await run_agent(gateway, 3, "Write a test.", X_Session_Id="my-agent")
        recorded(gateway)
    sessions = read_recording(path)
    assert [[call.body for call in session.calls] for session in sessions] == [
        [
            {name: body[name] for name in ("messages", "tools", "model")}
            for body in bodies
        ]
        for bodies in (first, other)
    ]  # fmt: skip
    call = sessions[0].calls[2]
    assert (call.path, call.num_prompt_tokens, call.num_generated_tokens) == (CHAT, 32, 5)
    assert os.stat(path).st_mode & 0o777 == 0o600


async def test_each_line_has_only_what_is_new_and_nothing_that_is_secret(tmp_path: Path) -> None:
    path = tmp_path / "record"
    keys = key_file(tmp_path, alice="alice-key")
    async with gateway_before(MeasuredRing(), record=str(path), keys=str(keys)) as (_, gateway):
        open_recorder(gateway, is_restart=False)
        await run_agent(
            gateway, 4, Authorization="Bearer alice-key", X_Session_Id="my-agent",
            X_Request_Id="my-request",
        )  # fmt: skip
        recorded(gateway)
    text = path.read_text()
    for secret in ("secret", "alice", "my-agent", "my-request", "Bearer"):
        assert secret not in text, secret
    assert text.count("You are an agent. " * 20) == 1
    assert [line["keeps"] for line in lines(path)] == [{}, *({"messages": n} for n in (2, 4, 6))]
    assert all(line["same"] == ["messages", "tools", "model"][1:] for line in lines(path)[1:])


async def test_sessions_are_found_by_their_turns_and_those_of_tenants_stay_apart(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record"
    keys = key_file(tmp_path, alice="alice-key", bob="bob-key")
    async with gateway_before(MeasuredRing(), record=str(path), keys=str(keys)) as (_, gateway):
        open_recorder(gateway, is_restart=False)
        for number in (1, 2):
            for name, task in (("alice", "One"), ("bob", "Two"), ("alice", "Three")):
                body = {"messages": turns(number, task)}
                await send(gateway, CHAT, body, Authorization=f"Bearer {name}-key")
        body = {"messages": turns(3, "One")}
        await send(gateway, CHAT, body, Authorization="Bearer bob-key")
        recorded(gateway)
    sessions = read_recording(path)
    assert [len(session.calls) for session in sessions] == [2, 2, 2, 1]


async def test_errors_batches_and_calls_of_stored_responses_are_not_recorded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record"
    async with gateway_before(MeasuredRing(), record=str(path)) as (_, gateway):
        open_recorder(gateway, is_restart=False)
        await send(gateway, CHAT, {"messages": turns(1), "temperature": -1})
        await send(gateway, "/tokenize", {"prompt": "Hi"})
        await send(gateway, "/v1/completions", {"prompt": "Hi"})
        await send(gateway, "/v1/responses", {"input": "Hi"})
        recorded(gateway)
    assert [line["path"] for line in lines(path)] == ["/v1/completions", "/v1/responses"]


async def test_a_stream_is_recorded_when_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "record"
    async with gateway_before(MeasuredRing(), record=str(path)) as (_, gateway):
        open_recorder(gateway, is_restart=False)
        await send(gateway, "/v1/completions", {"prompt": "Hi", "stream": True})
        recorded(gateway)
    (line,) = lines(path)
    assert line["body"] == {"prompt": "Hi", "stream": True}
    assert line["generated_tokens"] == 5 and line["first_token_s"] is not None


async def test_a_disk_that_fails_ends_the_recording_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "record"
    async with gateway_before(MeasuredRing(), record=str(path)) as (_, gateway):
        open_recorder(gateway, is_restart=False)

        def fail(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", fail)
        await run_agent(gateway, 2)
        wait_until(lambda: not gateway[RECORDER].is_recording, 30)
        await run_agent(gateway, 1)
        recorded(gateway)
    assert caplog.text.count("requests go on") == 1
    assert path.read_bytes() == b""


async def test_a_file_that_is_full_ends_the_recording_with_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_FILE_BYTES", 1500)
    path = tmp_path / "record"
    async with gateway_before(MeasuredRing(), record=str(path)) as (_, gateway):
        open_recorder(gateway, is_restart=False)
        await run_agent(gateway, 12)
        recorded(gateway)
    assert "at most 1500 are written" in caplog.text
    assert path.stat().st_size <= 1500
    assert 0 < len(lines(path)) < 12


async def test_what_does_not_fit_into_the_queue_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_WAITING_BYTES", 100)
    async with gateway_before(MeasuredRing(), record=str(tmp_path / "record")) as (_, gateway):
        open_recorder(gateway, is_restart=False)
        await run_agent(gateway, 2)
        recorded(gateway)
        assert gateway[RECORDER].num_left_out == 2


async def test_a_second_gateway_goes_on_behind_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for _ in range(2):
        async with gateway_before(MeasuredRing(), record=str(path)) as (_, gateway):
            open_recorder(gateway, is_restart=False)
            await run_agent(gateway, 2)
            recorded(gateway)
        path.write_bytes(path.read_bytes()[:-40])
    path.write_bytes(path.read_bytes() + b"\n")
    sessions = read_recording(path)
    assert [len(session.calls) for session in sessions] == [1, 1]


async def test_a_file_that_cannot_be_written_fails_the_start_and_no_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = str(tmp_path / "missing" / "record")
    async with gateway_before(ScriptedRing(["a"]), record=missing) as (_, gateway):
        with pytest.raises(ConfigError, match=r"--record .* cannot be written: No such file"):
            open_recorder(gateway, is_restart=False)
        open_recorder(gateway, is_restart=True).close()
        assert (await send(gateway, "/v1/completions", {"prompt": "Hi"})).status == 200
    assert "requests go on" in caplog.text


def test_a_device_is_refused() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        SessionRecorder(Path("/dev/null"))
