"""The load generator, with a client that answers without a server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.client.load_generator import LoadRun, SendOptions, drive
from bench.load.workload import PlannedRequest
from bench.load.workload import Prompt as PlannedPrompt
from quadriga.client import Completion, StreamChunk, Timings
from quadriga.client.types import Prompt
from quadriga.errors import QueueFull, RequestFailed
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import Usage
from simulator.trace import TraceRequest

PARAMS = SamplingParams(temperature=0.5)


class Time:
    """A clock that advances by a millisecond at each reading."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class FakeClient:
    """Answers a prompt with two chunks; "refuse" at once, "fail" and "abort" and "cut" later."""

    def __init__(self) -> None:
        self.sent: list[tuple[Prompt, SamplingParams | None, bool | None]] = []
        self.options: list[dict[str, Any]] = []

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for prompt, _, _ in self.sent]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        truncate_prompt: bool | None = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        self.sent.append((prompt, params, truncate_prompt))
        self.options.append(options)
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


def job(prompt: PlannedPrompt, at: float = 0.0, **changes: Any) -> PlannedRequest:
    return PlannedRequest(TraceRequest(at, (), **{"max_new_tokens": 3, **changes}), prompt)


def run(jobs: list[Any], *clients: FakeClient, **options: Any) -> LoadRun:
    """Drive the jobs; a bare prompt is a job due at once."""
    made = [item if isinstance(item, PlannedRequest) else job(item) for item in jobs]
    callbacks = {name: options.pop(name) for name in ("on_done", "clock") if name in options}
    send = SendOptions(PARAMS, **options)
    return asyncio.run(drive(clients or [FakeClient()], made, send, **callbacks))


def errors(result: LoadRun) -> list[str | None]:
    return [record.error for record in result.records]


def test_a_record_holds_what_came_back() -> None:
    client, ended = FakeClient(), []
    result = run(["x"], client, truncate=True, on_done=lambda: ended.append(1))
    (record,) = result.records
    params = SamplingParams(temperature=0.5, max_new_tokens=3)
    assert client.sent == [("x", params, True)]
    assert client.options == [{}]
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
    assert errors(result) == [None, error, None]
    assert len(ended) == 3


def test_each_client_keeps_to_a_connection_and_more_clients_share_them() -> None:
    clients = [FakeClient(), FakeClient()]
    run([job("a", client=7), job("b", client=2), job("c", client=9), job("d", client=2)], *clients)
    assert [client.prompts for client in clients] == [["a", "c"], ["b", "d"]]


def test_each_request_has_its_own_length_and_its_priority_where_it_has_one() -> None:
    client = FakeClient()
    run([job("a", max_new_tokens=7), job("b", max_new_tokens=9, priority=-2)], client)
    assert [params.max_new_tokens for _, params, _ in client.sent if params] == [7, 9]
    assert client.options == [{}, {"priority": -2}]


def test_a_text_can_be_the_message_of_a_chat() -> None:
    client = FakeClient()
    run(["Hi", [7]], client, as_chats=True)
    assert client.prompts == [[{"role": "user", "content": "Hi"}], [7]]


def test_times_of_submitting_are_those_of_the_clock() -> None:
    result = run(["a", "b"], clock=Time())
    for record in result.records:
        assert record.submit_end - record.submit_start == pytest.approx(0.001)
        assert record.due is None
    last = result.records[-1].submit_end
    assert result.start == pytest.approx(100.001)
    assert result.submit_wall == pytest.approx(last - 100.001)


def test_by_the_clock_each_is_due_at_its_own_time_whatever_its_place() -> None:
    client = FakeClient()
    jobs = [job("c", at=0.001), job("a"), job("b", at=0.0005)]
    result = run(jobs, client, clock=Time(), gap_s=None)
    assert client.prompts == ["a", "b", "c"]
    due = [record.due for record in result.records]
    assert due == pytest.approx([100.002, 100.001, 100.0015])


def test_the_next_turn_has_the_prompt_and_the_answer_of_the_one_before_in_front() -> None:
    client = FakeClient()
    jobs = [job([7, 8]), job([9], follows=0), job([], follows=1)]
    run([*jobs, job([5], follows=0, continues=False)], client)
    first, second = [7, 8], [7, 8, 1, 2, 3, 9]
    assert sorted(map(str, client.prompts)) == sorted(
        map(str, [first, second, [*second, 1, 2, 3], [5]])
    )


def test_a_following_request_is_due_after_the_end_of_the_one_before() -> None:
    result = run([job([7]), job([8], at=0.25, follows=0)], gap_s=None)
    assert result.records[1].due == pytest.approx(3.25)


def test_a_closed_loop_never_has_more_under_way_than_lanes() -> None:
    under_way: list[int] = []

    class Counting(FakeClient):
        now = 0

        async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
            self.now += 1
            under_way.append(self.now)
            for _ in range(9):
                await asyncio.sleep(0)
            async for chunk in super()._answer(prompt):
                yield chunk
                self.now -= chunk.completion is not None

    lanes = [job("x", follows=i - 2 if i > 1 else None, continues=False) for i in range(40)]
    result = run(lanes, Counting(), gap_s=None)
    assert errors(result) == [None] * 40
    assert max(under_way) == 2


def test_the_rest_of_a_chat_is_not_sent_when_a_turn_fails_but_the_lane_goes_on() -> None:
    class Failing(FakeClient):
        async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
            if prompt == [6]:
                raise RequestFailed("broke")
            async for chunk in super()._answer(prompt):
                yield chunk

    client, ended = Failing(), []
    jobs = [job([6]), job([7], follows=0), job([8], follows=1)]
    jobs.append(job([9], follows=2, continues=False))
    result = run(jobs, client, on_done=lambda: ended.append(1))
    assert client.prompts == [[6], [9]]
    assert errors(result) == [
        "RequestFailed: broke",
        "not sent: request 0, which it continues, failed",
        "not sent: request 1, which it continues, failed",
        None,
    ]
    assert [record.submit_start > 0 for record in result.records] == [True, False, False, True]
    assert len(ended) == 4


def test_a_bug_in_reading_is_not_swallowed() -> None:
    class Broken(FakeClient):
        async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
            raise ZeroDivisionError
            yield

    with pytest.raises(ZeroDivisionError):
        run(["x", "y"], Broken())


def test_answers_are_read_while_further_requests_are_being_sent() -> None:
    ended_before: list[int] = []
    client = FakeClient()
    prompts: list[str] = ["x"] * 50
    run(prompts, client, on_done=lambda: ended_before.append(len(client.sent)))
    assert ended_before[0] < 50


def test_cancelling_leaves_no_task_behind() -> None:
    class Silent(FakeClient):
        async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
            await asyncio.Event().wait()
            yield StreamChunk("r", "", [], [], 0.0)

    async def interrupt() -> int:
        task = asyncio.create_task(drive([Silent()], [job("x"), job("y")], SendOptions(PARAMS)))
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert asyncio.run(interrupt()) == 1


def test_no_more_than_the_limit_are_under_way_however_many_are_due() -> None:
    class Counting(FakeClient):
        now = most = 0

        async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
            self.now += 1
            self.most = max(self.most, self.now)
            for _ in range(20):
                await asyncio.sleep(0)
            try:
                async for chunk in super()._answer(prompt):
                    yield chunk
            finally:
                self.now -= 1

    limited, free = Counting(), Counting()
    for client, limit in ((limited, 2), (free, None)):
        result = run([job("x"), job("fail"), job("refuse"), *[job("y")] * 5], client,
                     gap_s=None, max_in_flight=limit)  # fmt: skip
        assert errors(result)[3:] == [None] * 5
    assert (limited.most, free.most > 2) == (2, True)


@pytest.mark.timeout(10)
def test_a_request_that_breaks_keeps_no_room_from_the_others() -> None:
    class Broken(FakeClient):
        async def _answer(self, prompt: Prompt) -> AsyncIterator[StreamChunk]:
            yield StreamChunk("r", "a", [1], [1.0], 2.0)
            if prompt == "break":
                raise ZeroDivisionError

    client = Broken()
    with pytest.raises(ZeroDivisionError):
        run([job("break"), job("x"), job("y")], client, max_in_flight=1)
    assert client.prompts == ["break", "x", "y"]
