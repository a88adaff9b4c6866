"""The soak's load at the ring's own socket: callers who do one thing after the other."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import aiohttp
import msgpack

from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.errors import DeadlineExceeded, PromptTooLong, QuadrigaError
from quadriga.wire.messages.arrays import pack_ids
from tests.faults.raw_client import RawClient
from tests.tiny_models import SENTENCES
from tests.wire import Wire

PATIENCE = 120.0
"""Seconds after which an answer counts as lost."""
MAX_LENGTH = 512
"""Prompt and answer together, in tokens, where the model's context allows it."""
PREFIXES, REPEATED = 12, 12
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "digit": {"type": "integer", "maximum": 9}},
    "required": ["ok", "digit"],
    "additionalProperties": False,
}
WORDS = " ".join(SENTENCES).split()
NEW_WORDS = 0.05
"""Their share: numbers, so that a cache of words gets as large as it may."""

Thing = Callable[[], Awaitable[str]]
"""What a caller may do; the coroutine gives the name of what became of it."""


class Wrong(Exception):
    """An answer is not what it had to be."""


@dataclass
class Tally:
    """What became of the requests. answers: what a prompt gave that is sent again and again.
    wrong: what should not have happened, and how often it did."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    answers: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the model. longest: tokens of prompt and answer of most requests."""

    context_length: int
    vocab_size: int

    @property
    def longest(self) -> int:
        return min(MAX_LENGTH, self.context_length)


async def do_one_after_the_other(
    things: dict[Thing, int], tally: Tally, chosen: random.Random, over: asyncio.Event
) -> None:
    """Things by their weights, until it is over. Whatever goes wrong is counted."""
    names, weights = list(things), list(things.values())
    while not over.is_set():
        thing = chosen.choices(names, weights)[0]
        name = getattr(thing, "__name__", "")
        try:
            tally.outcomes[await asyncio.wait_for(thing(), PATIENCE)] += 1
        except asyncio.TimeoutError:
            tally.wrong[f"{name}: lost, no end within {PATIENCE:g} s"] += 1
        except (QuadrigaError, Wrong, aiohttp.ClientError, OSError, ValueError) as error:
            tally.wrong[f"{name}: {type(error).__name__}: {error}"] += 1


class Writer:
    """Makes prompts and what is asked for, none of it longer than the model can."""

    def __init__(self, shape: Shape, chosen: random.Random) -> None:
        self._shape = shape
        self._chosen = chosen

    def text(self) -> str:
        """Short ones mostly. No word has more tokens than bytes."""
        most = 1 + int(self._shape.longest / 2 * self._chosen.random() ** 2)
        words: list[str] = []
        while most > 0:
            new = self._chosen.random() < NEW_WORDS
            word = str(self._chosen.randrange(10**6)) if new else self._chosen.choice(WORDS)
            words.append(word)
            most -= 1 + len(word.encode())
        return " ".join(words)

    def ids(self, length: int) -> list[int]:
        return [self._chosen.randrange(3, self._shape.vocab_size) for _ in range(length)]

    def new_tokens(self) -> int:
        return 1 + int(self._shape.longest / 3 * self._chosen.random() ** 2)

    def params(self, **fields: object) -> SamplingParams:
        """Greedy or sampled, to its full length unless the fields say otherwise."""
        temperature = self._chosen.choice([0.0, 0.8, 1.0])
        known = {"temperature": temperature, "ignore_eos": True} | fields
        return SamplingParams(max_new_tokens=self.new_tokens(), **known)  # type: ignore[arg-type]


class RingCaller:
    """One of those who use the client library; some share a connection."""

    def __init__(
        self, client: AsyncClient, shape: Shape, tally: Tally, chosen: random.Random
    ) -> None:
        self._client = client
        self._shape = shape
        self._tally = tally
        self._chosen = chosen
        self._writer = Writer(shape, chosen)
        self._turns: list[dict[str, str]] = []
        self.things: dict[Thing, int] = {
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
        """What is greedy stays the same, whatever else is in the batch."""
        number = self._chosen.randrange(REPEATED)
        params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
        answer = await self._client.generate([5 + number] * (10 + number), params)
        if self._tally.answers.setdefault(number, answer.token_ids) != answer.token_ids:
            raise Wrong(f"prompt {number} has another answer than before")
        return "finished"

    async def grammar(self) -> str:
        """Known and new ones; a text that was cut off need not be whole."""
        kind = self._chosen.randrange(3)
        pattern = f"[a-z]{{2,5}}-{self._chosen.randrange(10_000) if kind else 7}"
        fields = {"regex": pattern} if kind < 2 else {"json_schema": SCHEMA}
        params = self._writer.params(ignore_eos=False, **fields)
        answer = await self._client.generate(self._writer.text(), params)
        if answer.finish_reason == "stop":
            if kind == 2:
                json.loads(answer.text)
            elif not re.fullmatch(pattern, answer.text):
                raise Wrong(f"{answer.text!r} does not obey {pattern}")
        return "finished"

    async def abort(self) -> str:
        handle = self._client.submit(self._writer.text(), self._writer.params())
        most = self._chosen.randrange(4)
        if most == 0:
            await self._client.abort(handle.request_id)
        count = 0
        async for chunk in handle:
            count += 1
            if count == most:
                await self._client.abort(handle.request_id)
            last = chunk
        if last.completion is None or last.completion.finish_reason not in ("abort", "length"):
            raise Wrong(f"aborted, and ended with {last.completion}")
        return f"ended: {last.completion.finish_reason}"

    async def leave(self) -> str:
        """Read no further."""
        stream = self._client.stream(self._writer.text(), self._writer.params())
        async with aclosing(stream):  # type: ignore[type-var]
            async for _ in stream:
                if self._chosen.random() < 0.3:
                    break
        return "left"

    async def vanish(self) -> str:
        """Close the socket without a word, some before anything came."""
        params = {"max_new_tokens": self._shape.longest // 2, "ignore_eos": True}
        ids = pack_ids(self._writer.ids(6))
        message = ["generate", 1, "r", "", params, True, None, ids]
        patient = self._chosen.random() < 0.7
        with RawClient(self._client.endpoint) as other:
            other.send(msgpack.packb(message))
            await asyncio.sleep(0.02)
            while patient and not other.socket.poll(0):
                await asyncio.sleep(0.02)
        return "vanished"

    async def several(self) -> str:
        params = self._writer.params(n=2, logprobs=2, prompt_logprobs=1)
        answer = await self._client.generate(self._writer.text(), params)
        for choice in (answer, *answer.others):
            _whole(choice, params)
            if len(choice.logprobs or []) != params.max_new_tokens:
                raise Wrong(f"log-probabilities of {len(choice.logprobs or [])} tokens")
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
        raise Wrong("a prompt over the context was taken")

    async def too_late(self) -> str:
        try:
            await self._client.generate(self._writer.text(), self._writer.params(), timeout=0.03)
        except DeadlineExceeded:
            return "ended: deadline"
        return "finished"

    async def connect_anew(self) -> str:
        params = self._writer.params()
        async with AsyncClient(self._client.endpoint, connect_timeout=PATIENCE) as client:
            return _whole(await client.generate(self._writer.text(), params), params)

    async def lose_connection(self) -> str:
        """Have the connection cut in the middle of a stream, which goes on where it stood."""
        wire, params = Wire(), self._writer.params()
        async with (
            wire.to(self._client.endpoint) as endpoint,
            AsyncClient(endpoint, connect_timeout=PATIENCE) as client,
        ):
            async for chunk in client.stream(self._writer.text(), params):
                if self._chosen.random() < 0.2:
                    wire.cut()
                last = chunk
        return _whole(last.completion, params)

    async def questions(self) -> str:
        text = self._writer.text()
        ids = await self._client.tokenize(text)
        if await self._client.detokenize(ids) != text:
            raise Wrong(f"{text!r} became another text")
        return "answered"


def _whole(completion: Completion | None, params: SamplingParams) -> str:
    """What must have its full length has it."""
    if completion is None or len(completion.token_ids) != params.max_new_tokens:
        raise Wrong(f"{params.max_new_tokens} tokens were asked for, this came: {completion}")
    return "finished"
