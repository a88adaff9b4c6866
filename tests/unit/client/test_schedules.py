"""Calls of one client while its server comes and goes: each ends, in time, with what is right.

A random schedule for each seed, in virtual time and over a scripted network: a call that would hang
is seen as soon as nothing can happen any more.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quadriga.client.async_client import AsyncClient
from quadriga.client.connection import MAX_PAUSE_S
from quadriga.client.request_handle import RequestHandle
from quadriga.client.types import Completion
from quadriga.errors import DeadlineExceeded, QuadrigaError
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import Accepted
from tests.unit import virtual_time
from tests.unit.scripted_network import Network
from tests.unit.scripted_server import SILENT, Server, letter

CHAOS_S = 15.0
NUM_CALLS = 14
MAX_WAIT_S = 120.0
"""For calls without a timeout, which end when the server has calmed down."""
MAX_RETURN_S = MAX_PAUSE_S + 1.0
"""From the moment at which a server is there until its client has found it."""
INSTANT_S = 1e-6
NUM_SEEDS = 100


def check(completion: Completion, prompt: str, params: SamplingParams) -> None:
    """Check that each choice has its whole text, or its beginning if the request was aborted."""
    for choice in (completion, *completion.others):
        most = params.max_new_tokens or 0
        expected = chr(letter(prompt, choice.index)) * most
        assert choice.text == expected[: len(choice.token_ids)]
        assert choice.finish_reason in ("length", "abort")
        assert choice.finish_reason == "abort" or choice.text == expected
    assert len(completion.others) == params.n - 1


class World:
    """One schedule: a client, its calls, and what happens to its server meanwhile."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.chosen = chosen = random.Random(seed)
        self.network = Network(chosen)
        self.network.install(patch)
        self.server = Server(self.network, chosen)
        self.connect_timeout = chosen.uniform(0.5, 5)
        self.client = AsyncClient(
            "tcp://scripted", self.connect_timeout, reconnect_timeout=chosen.uniform(0.5, 6)
        )
        self.handles: list[RequestHandle] = []
        self.outcomes: list[str] = []
        self.under_way: set[asyncio.Task[Any]] = set()

    async def run(self) -> list[str]:
        if self.chosen.random() < 0.5:
            self.server.start()
        calls = [asyncio.create_task(self._call()) for _ in range(NUM_CALLS)]
        chaos = asyncio.create_task(self._chaos())
        await asyncio.wait_for(asyncio.gather(chaos, *calls), MAX_WAIT_S)
        await self._finds_calm_server()
        await self.client.close()
        assert not len(self.client._inflight)
        assert not self.client._connection._search.is_running
        assert not self.client._connection._waiters
        assert not self.network.open_sockets
        for handle in self.handles:
            assert handle.done and handle._retry is None
        return self.outcomes

    async def _finds_calm_server(self) -> None:
        """Whatever it went through, a client soon finds a server that is there and answers."""
        self.server.calm_down()
        self.server.start()
        latest = asyncio.get_running_loop().time() + MAX_RETURN_S
        while True:
            try:
                assert await self.client.tokenize("x") == [1, 2, 3]
                return
            except QuadrigaError:
                assert asyncio.get_running_loop().time() < latest
                await asyncio.sleep(0.1)

    # --- what happens to the server ---------------------------------------------------------------

    async def _chaos(self) -> None:
        loop, end = asyncio.get_running_loop(), asyncio.get_running_loop().time() + CHAOS_S
        happenings = [self._restart, self._restart, self._vanish, self._appear, self._appear,
                      self._freeze, self._cut, self._jam, self._leave, self._mood, self._replay_all,
                      self._close_client]  # fmt: skip
        while loop.time() < end:
            await asyncio.sleep(self.chosen.choice([0.01, 0.1, 0.5, 2]) * self.chosen.random())
            await self.chosen.choice(happenings)()
        if self.chosen.random() < 0.7:
            await self._finds_calm_server()
        else:
            self.server.calm_down()
            self.network.vanish()

    async def _appear(self) -> None:
        self.server.start()

    async def _vanish(self) -> None:
        self.network.vanish()
        if self.chosen.random() < 0.3:
            self.server.requests.clear()

    async def _restart(self) -> None:
        await self._vanish()
        await asyncio.sleep(self.chosen.choice([0, 0.05, 0.2, 1]))
        self.server.start()

    async def _freeze(self) -> None:
        door = self.server.door
        if door is not None:
            door.is_frozen = True
            await asyncio.sleep(self.chosen.choice([0.05, 0.5, 3]))
            if self.chosen.random() < 0.5:
                await self._restart()
            else:
                door.is_frozen = False
                self.network.thaw()

    async def _cut(self) -> None:
        self.network.cut()

    async def _jam(self) -> None:
        self.network.jam()
        self.network.cut()

    async def _leave(self) -> None:
        code = self.chosen.choice(["server_stopping", "server_failed", "slow_reader"])
        self.server.farewell(code)
        if code != "slow_reader":
            await asyncio.sleep(self.chosen.choice([0.01, 0.2]))
            self.network.vanish()

    async def _mood(self) -> None:
        self.server.ping_loss = self.chosen.choice([0, 0, 0.5, 1])
        self.server.refusal = self.chosen.choice([0, 0, 0.5, 1])
        self.server.retry_after = self.chosen.choice([None, 0.1, 0.5, 2.0])
        self.server.gap = self.chosen.choice([0, 0, 0.2])
        self.server.slowness = self.chosen.choice([0.01, 0.1, 1])

    async def _replay_all(self) -> None:
        for request in list(self.server.requests.values()):
            self.server.replay(request)

    async def _close_client(self) -> None:
        """Every call that waits ends at once; later calls connect again."""
        if self.chosen.random() < 0.3:
            waiting = set(self.under_way)
            await self.client.close()
            await asyncio.sleep(INSTANT_S)
            assert all(call.done() for call in waiting)

    # --- the calls --------------------------------------------------------------------------------

    async def _call(self) -> None:
        """Make a call, perhaps cancel it; it must end in time with a result or a named error."""
        loop, chosen = asyncio.get_running_loop(), self.chosen
        await asyncio.sleep(chosen.choice([0, chosen.uniform(0, CHAOS_S)]))
        kinds: list[Callable[[float | None], Coroutine[Any, Any, None]]] = [
            self._generate, self._generate_all, self._stream, self._readers, self._sink,
            self._info, self._tokenize, self._abort, self._connect,
        ]  # fmt: skip
        kind = chosen.choice(kinds)
        timeout = chosen.choice([None, None, chosen.uniform(0.01, 6)])
        most = MAX_WAIT_S if timeout is None else timeout
        if kind in (self._abort, self._connect):
            most = self.connect_timeout
        elif kind in (self._readers, self._sink):  # submit's timeout begins when it is connected
            most += self.connect_timeout
        began = loop.time()
        call = asyncio.create_task(kind(timeout))
        self.under_way.add(call)
        call.add_done_callback(self.under_way.discard)
        cancel = loop.call_later(chosen.uniform(0, 3), call.cancel)
        if chosen.random() < 0.8:
            cancel.cancel()
        try:
            await call
            self.outcomes.append(f"{kind.__name__} ok")
        except (QuadrigaError, asyncio.CancelledError) as error:
            self.outcomes.append(f"{kind.__name__} {type(error).__name__}")
            if isinstance(error, DeadlineExceeded):
                assert timeout is not None or kind == self._info
        finally:
            cancel.cancel()
        assert loop.time() - began <= most + 0.01, (kind.__name__, timeout, self.outcomes[-1])

    def _ask(self, timeout: float | None) -> tuple[str, SamplingParams]:
        """Only a call with a timeout may meet silence."""
        prompt = f"p{self.chosen.randrange(1000)}"
        if timeout is not None and self.chosen.random() < 0.2:
            prompt += SILENT
        params = SamplingParams(
            max_new_tokens=self.chosen.randint(1, 40), n=self.chosen.choice([1, 1, 2])
        )
        return prompt, params

    async def _generate(self, timeout: float | None) -> None:
        prompt, params = self._ask(timeout)
        check(await self.client.generate(prompt, params, timeout=timeout), prompt, params)

    async def _generate_all(self, timeout: float | None) -> None:
        prompts, params = [self._ask(timeout)[0] for _ in range(3)], self._ask(None)[1]
        completions = await self.client.generate([*prompts], params, timeout=timeout)
        for prompt, completion in zip(prompts, completions, strict=True):
            check(completion, prompt, params)
        no_prompts: list[str] = []
        assert await self.client.generate(no_prompts, params) == []

    async def _stream(self, timeout: float | None) -> None:
        prompt, params = self._ask(timeout)
        leaves = self.chosen.random() < 0.2
        texts = [""] * params.n
        async for chunk in self.client.stream(prompt, params, timeout=timeout):
            texts[chunk.index] += chunk.text
            if chunk.completion is not None:
                assert texts[chunk.index] == chunk.completion.text
                assert chunk.completion.finish_reason in ("length", "abort")
            elif leaves:
                return
        for index, text in enumerate(texts):
            assert set(text) <= {chr(letter(prompt, index))}

    async def _readers(self, timeout: float | None) -> None:
        """Several tasks read from one handle, and one may abort it: all of them end."""
        await self.client.connect()
        handle = self.client.submit(*self._ask(timeout), timeout=timeout)
        self.handles.append(handle)

        async def read() -> None:
            async for _ in handle:
                await asyncio.sleep(0)

        readers = [asyncio.create_task(read()) for _ in range(3)]
        if self.chosen.random() < 0.3:
            asyncio.get_running_loop().call_later(self.chosen.random(), handle.abort)
        try:
            for error in await asyncio.gather(*readers, return_exceptions=True):
                if error is not None:
                    raise error
        finally:
            handle.abort()

    async def _sink(self, timeout: float | None) -> None:
        await self.client.connect()
        prompt, params = self._ask(timeout)
        ended: asyncio.Future[QuadrigaError | None] = asyncio.get_running_loop().create_future()
        texts = [""] * params.n
        left = params.n
        accepted: list[Accepted] = []

        def take(item: Any) -> None:
            nonlocal left
            assert not ended.done() or ended.cancelled()
            assert accepted or isinstance(item, QuadrigaError)
            if isinstance(item, QuadrigaError):
                ended.set_result(item)
                return
            texts[item.index] += item.text
            left -= item.completion is not None
            if not left:
                ended.set_result(None)

        handle = self.client.submit(
            prompt, params, timeout=timeout, sink=take, on_accepted=accepted.append
        )
        self.handles.append(handle)
        try:
            error = await ended
        finally:
            handle.abort()
        assert [message.num_prompt_tokens for message in accepted] in ([], [len(prompt)])
        if error is not None:
            raise error

    async def _info(self, timeout: float | None) -> None:
        assert "running" in await self.client.info(timeout or 10.0)

    async def _tokenize(self, timeout: float | None) -> None:
        assert await self.client.tokenize("text", timeout=timeout or 60.0) == [1, 2, 3]

    async def _abort(self, timeout: float | None) -> None:
        await self.client.abort(self.chosen.choice(["", "unknown"]))

    async def _connect(self, timeout: float | None) -> None:
        await self.client.connect()


@pytest.mark.parametrize("block", range(4))
def test_every_call_ends_in_time_with_what_is_right(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: set[str] = set()
    for seed in range(block * NUM_SEEDS, (block + 1) * NUM_SEEDS):
        try:
            outcomes.update(virtual_time.run(World(seed, monkeypatch).run()))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    # The schedules would be of no use if calls ended in one way only.
    ends = {outcome.split()[1] for outcome in outcomes}
    assert ends >= {"ok", "ServerUnreachable", "DeadlineExceeded", "RequestAborted", "QueueFull",
                    "ServerFailed", "ServerStopping", "SlowReader", "CancelledError"}  # fmt: skip
    assert sum(outcome.endswith(" ok") for outcome in outcomes) == 9, outcomes
