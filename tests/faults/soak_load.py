"""The soak's load at the ring's own socket: clients that run one action after the other."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import aiohttp
import msgpack

from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.errors import DeadlineExceeded, PromptTooLong, QuadrigaError
from quadriga.wire.packing import pack_ids
from tests.faults.raw_client import RawClient
from tests.tcp_proxy import TcpProxy
from tests.tiny_models import SENTENCES

TIMEOUT_S = 120.0  # an answer that takes longer counts as lost
MAX_TOKENS = 512  # of prompt and answer together, if the model's context allows it
PREFIXES, REPEATED = 12, 12
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "digit": {"type": "integer", "maximum": 9}},
    "required": ["ok", "digit"],
    "additionalProperties": False,
}
WORDS = " ".join(SENTENCES).split()
# Share of numbers among the words, which fill the cache of words.
NEW_WORDS_SHARE = 0.05

# An action of a client; the coroutine returns the name of its outcome.
Action = Callable[[], Awaitable[str]]


class WrongAnswer(Exception):
    """An answer is not the expected one."""


@dataclass
class Tally:
    """Outcomes of the requests.

    Attributes:
        outcomes: Counts by name.
        wrong: Counts of wrong answers and errors.
        answers: Token ids of the answers to repeated prompts.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    answers: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    context_length: int
    vocab_size: int

    @property
    def longest(self) -> int:
        """Number of tokens of prompt and answer of most requests, at most."""
        return min(MAX_TOKENS, self.context_length)


class Pace:
    """The moments at which actions of all clients begin, at equal distances.

    What a server holds depends on how much it does at a time. With a pace that it keeps on a
    computer with changing other work, its memory and files can be compared.

    Args:
        per_second: Actions; 0: each begins when the one before it of its client has ended.
    """

    def __init__(self, per_second: float = 0.0) -> None:
        self._distance_s = 1 / per_second if per_second else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        """Wait for the next moment. What was missed is not caught up."""
        if self._distance_s:
            now = time.monotonic()
            self._next = max(now, self._next + self._distance_s)
            await asyncio.sleep(self._next - now)


async def run_actions(
    actions: dict[Action, int],
    tally: Tally,
    chosen: random.Random,
    pace: Pace,
    stopping: asyncio.Event,
) -> None:
    """Run actions at random by their weights until `stopping`; count every error."""
    names, weights = list(actions), list(actions.values())
    while not stopping.is_set():
        await pace.wait()
        action = chosen.choices(names, weights)[0]
        name = getattr(action, "__name__", "")
        try:
            tally.outcomes[await asyncio.wait_for(action(), TIMEOUT_S)] += 1
        except asyncio.TimeoutError:
            tally.wrong[f"{name}: lost, no end within {TIMEOUT_S:g} s"] += 1
        except (QuadrigaError, WrongAnswer, aiohttp.ClientError, OSError, ValueError) as error:
            tally.wrong[f"{name}: {type(error).__name__}: {error}"] += 1


class Writer:
    """Makes prompts and parameters within the model's context."""

    def __init__(self, shape: Shape, chosen: random.Random) -> None:
        self._shape = shape
        self._chosen = chosen

    def text(self) -> str:
        """Return a text, mostly a short one. No word has more tokens than bytes."""
        budget = 1 + int(self._shape.longest / 2 * self._chosen.random() ** 2)
        words: list[str] = []
        while budget > 0:
            new = self._chosen.random() < NEW_WORDS_SHARE
            word = str(self._chosen.randrange(10**6)) if new else self._chosen.choice(WORDS)
            words.append(word)
            budget -= 1 + len(word.encode())
        return " ".join(words)

    def ids(self, length: int) -> list[int]:
        return [self._chosen.randrange(3, self._shape.vocab_size) for _ in range(length)]

    def new_tokens(self) -> int:
        return 1 + int(self._shape.longest / 3 * self._chosen.random() ** 2)

    def params(self, **fields: object) -> SamplingParams:
        """Return greedy or sampled parameters, of full length unless the fields say otherwise."""
        temperature = self._chosen.choice([0.0, 0.8, 1.0])
        known = {"temperature": temperature, "ignore_eos": True} | fields
        return SamplingParams(max_new_tokens=self.new_tokens(), **known)  # type: ignore[arg-type]


class RingClient:
    """A client that uses the client library; some clients share a connection."""

    def __init__(
        self, client: AsyncClient, shape: Shape, tally: Tally, chosen: random.Random
    ) -> None:
        self._client = client
        self._shape = shape
        self._tally = tally
        self._chosen = chosen
        self._writer = Writer(shape, chosen)
        self._turns: list[dict[str, str]] = []
        self.actions: dict[Action, int] = {
            self.stream: 20,
            self.whole: 10,
            self.shared_prefix: 15,
            self.chat: 15,
            self.repeat: 8,
            self.grammar: 8,
            self.abort: 6,
            self.leave: 6,
            self.vanish: 4,
            self.several: 3,
            self.stop: 3,
            self.too_long: 3,
            self.too_late: 3,
            self.connect_anew: 3,
            self.lose_connection: 6,
            self.questions: 3,
        }

    async def stream(self) -> str:
        params = self._writer.params()
        async for chunk in self._client.stream(self._writer.text(), params):
            last = chunk
        return _whole(last.completion, params)

    async def whole(self) -> str:
        params = self._writer.params()
        return _whole(await self._client.generate(self._writer.text(), params), params)

    async def shared_prefix(self) -> str:
        number, params = self._chosen.randrange(PREFIXES), self._writer.params()
        prompt = [3 + number] * (self._shape.longest // 4) + self._writer.ids(5)
        return _whole(await self._client.generate(prompt, params), params)

    async def chat(self) -> str:
        """One more turn, until the chat is too long and another one begins."""
        self._turns.append({"role": "user", "content": self._writer.text()[:40]})
        try:
            completion = await self._client.generate(
                self._turns, self._writer.params(), clamp_max_new_tokens=True
            )
        except PromptTooLong:
            self._turns = []
            return "refused: too long"
        self._turns.append({"role": "assistant", "content": completion.text})
        return "finished"

    async def repeat(self) -> str:
        """Check that a greedy answer does not depend on the batch."""
        number = self._chosen.randrange(REPEATED)
        params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
        answer = await self._client.generate([5 + number] * (10 + number), params)
        if self._tally.answers.setdefault(number, answer.token_ids) != answer.token_ids:
            raise WrongAnswer(f"prompt {number} has another answer than before")
        return "finished"

    async def grammar(self) -> str:
        """Use known and new grammars; a text that was cut off need not be complete."""
        kind = self._chosen.randrange(3)
        pattern = f"[a-z]{{2,5}}-{self._chosen.randrange(10_000) if kind else 7}"
        fields = {"regex": pattern} if kind < 2 else {"json_schema": SCHEMA}
        params = self._writer.params(ignore_eos=False, **fields)
        answer = await self._client.generate(self._writer.text(), params)
        if answer.finish_reason == "stop":
            if kind == 2:
                json.loads(answer.text)
            elif not re.fullmatch(pattern, answer.text):
                raise WrongAnswer(f"{answer.text!r} does not obey {pattern}")
        return "finished"

    async def abort(self) -> str:
        handle = self._client.submit(self._writer.text(), self._writer.params())
        num_chunks = self._chosen.randrange(4)
        if num_chunks == 0:
            await self._client.abort(handle.request_id)
        count = 0
        async for chunk in handle:
            count += 1
            if count == num_chunks:
                await self._client.abort(handle.request_id)
            last = chunk
        if last.completion is None or last.completion.finish_reason not in ("abort", "length"):
            raise WrongAnswer(f"aborted, and ended with {last.completion}")
        return f"ended: {last.completion.finish_reason}"

    async def leave(self) -> str:
        """Close a stream before its end."""
        stream = self._client.stream(self._writer.text(), self._writer.params())
        async with aclosing(stream):  # type: ignore[type-var]
            async for _ in stream:
                if self._chosen.random() < 0.3:
                    break
        return "left"

    async def vanish(self) -> str:
        """Close the socket without an abort, sometimes before the first answer."""
        params = {"max_new_tokens": self._shape.longest // 2, "ignore_eos": True}
        ids = pack_ids(self._writer.ids(6))
        message = ["generate", 1, "r", "", params, True, None, ids]
        waits = self._chosen.random() < 0.7
        with RawClient(self._client.endpoint) as other:
            other.send(msgpack.packb(message))
            await asyncio.sleep(0.02)
            while waits and not other.socket.poll(0):
                await asyncio.sleep(0.02)
        return "vanished"

    async def several(self) -> str:
        params = self._writer.params(n=2, logprobs=2, prompt_logprobs=1)
        answer = await self._client.generate(self._writer.text(), params)
        for choice in (answer, *answer.others):
            _whole(choice, params)
            if len(choice.logprobs or []) != params.max_new_tokens:
                raise WrongAnswer(f"log-probabilities of {len(choice.logprobs or [])} tokens")
        return "finished"

    async def stop(self) -> str:
        params = self._writer.params(stop=["e", "qu"], stop_regex=r"\d\d")
        answer = await self._client.generate(self._writer.text(), params)
        return f"ended: {answer.finish_reason}"

    async def too_long(self) -> str:
        try:
            await self._client.generate(self._writer.ids(self._shape.context_length + 1))
        except PromptTooLong:
            return "refused: too long"
        raise WrongAnswer("a prompt over the context was accepted")

    async def too_late(self) -> str:
        try:
            await self._client.generate(self._writer.text(), self._writer.params(), timeout=0.03)
        except DeadlineExceeded:
            return "ended: deadline"
        return "finished"

    async def connect_anew(self) -> str:
        params = self._writer.params()
        async with AsyncClient(self._client.endpoint, connect_timeout=TIMEOUT_S) as client:
            return _whole(await client.generate(self._writer.text(), params), params)

    async def lose_connection(self) -> str:
        """Cut the connection in the middle of a stream, which must continue."""
        proxy, params = TcpProxy(), self._writer.params()
        async with (
            proxy.open(self._client.endpoint) as endpoint,
            AsyncClient(endpoint, connect_timeout=TIMEOUT_S) as client,
        ):
            async for chunk in client.stream(self._writer.text(), params):
                if self._chosen.random() < 0.2:
                    proxy.cut()
                last = chunk
        return _whole(last.completion, params)

    async def questions(self) -> str:
        text = self._writer.text()
        ids = await self._client.tokenize(text)
        if await self._client.detokenize(ids) != text:
            raise WrongAnswer(f"{text!r} became another text")
        return "answered"


def _whole(completion: Completion | None, params: SamplingParams) -> str:
    """Check that a completion has its full length."""
    if completion is None or len(completion.token_ids) != params.max_new_tokens:
        raise WrongAnswer(f"{params.max_new_tokens} tokens were requested, got {completion}")
    return "finished"
