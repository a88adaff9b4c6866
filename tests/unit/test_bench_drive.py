"""The run loop, with a client that answers by itself."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.drive import Run, drive
from bench.workload import Prompt, Schedule
from quadriga.client import Completion, StreamChunk, Timings
from quadriga.errors import QueueFull, RequestFailed
from quadriga.messages import Usage
from quadriga.sampling import SamplingParams

PARAMS = SamplingParams(max_new_tokens=3)


class Time:
    """A clock of which each look takes a millisecond."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class FakeClient:
    """Answers a prompt with two chunks; "refuse" at once, "fail" and "abort" and "cut" later."""

    def __init__(self) -> None:
        self.sent: list[tuple[Prompt, SamplingParams | None, bool | None]] = []

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        truncate_prompt: bool | None = None,
    ) -> AsyncIterator[Any]:
        self.sent.append((prompt, params, truncate_prompt))
        if prompt == "refuse":
            raise QueueFull("no room")
        return self._answer(prompt)

    async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
        await asyncio.sleep(0)
        yield StreamChunk("r", "a", [1], [1.0], 2.0)
        if prompt == "fail":
            raise RequestFailed("broke")
        if prompt == "cut":
            return
        reason = "abort" if prompt == "abort" else "length"
        timings = Timings(0.5, received=0.6, tokenized=0.7, admitted=0.8, first_token=1.0)
        done = Completion("r", "abc", [1, 2, 3], reason, Usage(5, 3, 4), timings)
        yield StreamChunk("r", "bc", [2, 3], [1.5, 1.6], 3.0, done)


def run(prompts: list[Prompt], *clients: FakeClient, **options: Any) -> Run:
    return asyncio.run(drive(clients or [FakeClient()], prompts, PARAMS, **options))


def test_a_record_holds_what_came_back() -> None:
    client, ended = FakeClient(), []
    result = run(["x"], client, truncate=True, on_done=lambda: ended.append(1))
    (record,) = result.records
    assert client.sent == [("x", PARAMS, True)]
    assert record.error is None
    assert record.arrivals == [2.0, 3.0, 3.0]
    assert record.token_times == [1.0, 1.5, 1.6]
    assert record.finished == 3.0
    assert (record.received, record.tokenized, record.admitted) == (0.6, 0.7, 0.8)
    assert (record.first_token, record.first_received) == (1.0, 2.0)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (5, 3, 4)
    assert ended == [1]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", "QueueFull: no room"),
        ("fail", "RequestFailed: broke"),
        ("abort", "ended by abort"),
        ("cut", "the stream ended without an end marker"),
    ],
)
def test_a_failure_stays_with_its_request(prompt: str, error: str) -> None:
    ended: list[int] = []
    result = run(["x", prompt, "y"], on_done=lambda: ended.append(1))
    assert [record.error for record in result.records] == [None, error, None]
    assert len(ended) == 3


def test_requests_are_spread_over_the_clients_in_turn() -> None:
    clients = [FakeClient(), FakeClient()]
    run(["a", "b", "c"], *clients)
    assert [[prompt for prompt, _, _ in client.sent] for client in clients] == [["a", "c"], ["b"]]


def test_times_of_submitting_are_those_of_the_clock() -> None:
    result = run(["a", "b"], clock=Time())
    for record in result.records:
        assert record.submit_end - record.submit_start == pytest.approx(0.001)
        assert record.due is None
    last = result.records[-1].submit_end
    assert result.submit_wall == pytest.approx(last - 100.001)


def test_the_absolute_schedule_says_when_each_was_due() -> None:
    result = run(["a", "b", "c"], clock=Time(), schedule=Schedule(0.0005, absolute=True))
    due = [record.due for record in result.records]
    assert due == pytest.approx([100.001, 100.0015, 100.002])


def test_what_arrives_is_read_while_the_rest_is_being_sent() -> None:
    ended_before: list[int] = []
    client = FakeClient()
    prompts: list[Prompt] = ["x"] * 50
    run(prompts, client, on_done=lambda: ended_before.append(len(client.sent)))
    assert ended_before[0] < 50


def test_cancelling_leaves_no_task_behind() -> None:
    class Silent(FakeClient):
        async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
            await asyncio.Event().wait()
            yield StreamChunk("r", "", [], [], 0.0)

    async def interrupt() -> int:
        task = asyncio.create_task(drive([Silent()], ["x", "y"], PARAMS))
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert asyncio.run(interrupt()) == 1
