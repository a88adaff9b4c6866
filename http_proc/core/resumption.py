"""What makes a resumable request the same again, for a gateway that replaces another.

Everything that a gateway would draw at random is a function of the key, and what it reads from a
clock or a store is a decision, which is made once and kept on disk before a client sees what
follows from it. So the events of an answer are a function of its tokens and these values alone.
"""

import hashlib
import secrets
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quadriga.client.types import Completion, KeptRequest, StreamChunk
from quadriga.sampling.params import MAX_SEED, SamplingParams

NUM_KEY_BYTES = 16
BYTES_PER_TOKEN = 4


@dataclass(slots=True)
class AnswerTokens:
    """The tokens of an answer so far.

    Attributes:
        of_choice: token ids by the number of the choice.
        stops: the stop token or string that has ended a choice, by its number; None: neither has.
        num_bytes: size of the token ids.
    """

    of_choice: "defaultdict[int, array[int]]" = field(
        default_factory=lambda: defaultdict(lambda: array("i"))
    )
    stops: dict[int, str | int | None] = field(default_factory=dict)
    num_bytes: int = 0

    def take(self, choice: int, chunk: StreamChunk) -> None:
        """Take the next chunk of a choice."""
        self.of_choice[choice].extend(chunk.token_ids)
        self.num_bytes += BYTES_PER_TOKEN * len(chunk.token_ids)
        if chunk.completion is not None:
            self.stops[choice] = chunk.completion.matched_stop


@dataclass(slots=True)
class Resumption:
    """The values of one request.

    Attributes:
        key: unique for ever; the ids of the server's requests, seeds and ids of calls come from it.
        created: Unix seconds, for the field `created` of the answer.
        keep_s: seconds for which the server goes on without a gateway.
        is_resent: a gateway before this one has sent it to the server.
        decisions: JSON values by name, those of gateways before this one among them.
        on_decision: called after each new one, to keep `decisions`.
        answer: the tokens of the answer so far.
    """

    key: str
    created: int
    keep_s: float
    is_resent: bool = False
    decisions: dict[str, Any] = field(default_factory=dict)
    on_decision: Callable[[], None] | None = None
    answer: AnswerTokens = field(default_factory=AnswerTokens)
    _num_ids: int = 0

    def kept_request(self, index: int) -> KeptRequest:
        """Return how the server knows prompt number `index`."""
        return KeptRequest(f"{self.key}-{index}", self.keep_s, self.is_resent)

    def params(self, params: SamplingParams, index: int) -> SamplingParams:
        """Return the parameters of prompt number `index`, with a seed and text lengths."""
        seed = params.seed
        if seed is None:
            seed = self._number(f"seed {index}") % MAX_SEED
        return msgspec.structs.replace(params, seed=seed, text_lengths=True)

    def next_chars(self, count: int, alphabet: str) -> str:
        """Return the characters of the next id that the answer needs."""
        self._num_ids += 1
        number, chars = self._number(f"id {self._num_ids}"), ""
        for _ in range(count):
            number, index = divmod(number, len(alphabet))
            chars += alphabet[index]
        return chars

    def decide(self, name: str, value: Any) -> Any:
        """Return the decision of this name, which is `value` unless it was made before."""
        if name not in self.decisions:
            self.decisions[name] = value
            if self.on_decision is not None:
                self.on_decision()
        return self.decisions[name]

    def repeat_end(self, choice: int, completion: Completion) -> None:
        """Give the end of a choice the times and the cache hits that it had when it came first.

        Two runs differ in them, and the last events of an answer show them.
        """
        times, usage = completion.timings, completion.usage
        tokens_at = times.token_times
        end = [
            usage.cached_tokens, times.submitted, times.received, times.tokenized, times.admitted,
            times.first_token, times.detokenized, times.delivered,
            len(tokens_at), *tokens_at[:1], *tokens_at[-1:],
        ]  # fmt: skip
        decided = self.decide(f"end {choice}", end)
        if decided is end:
            return
        cached, times.submitted, times.received, times.tokenized, times.admitted = decided[:5]
        times.first_token, times.detokenized, times.delivered, num_tokens = decided[5:9]
        first_and_last = decided[9:]
        times.token_times = [*first_and_last[:1] * (num_tokens - 1), *first_and_last[1:]]
        completion.usage = msgspec.structs.replace(usage, cached_tokens=cached)

    def _number(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.key} {name}".encode()).digest(), "little")


def new_key() -> str:
    """Return the key of a new request."""
    return secrets.token_hex(NUM_KEY_BYTES)


_resumption: ContextVar[Resumption | None] = ContextVar("resumption", default=None)


def set_resumption(resumption: Resumption | None) -> None:
    """Set the values of the request that this task answers from now on."""
    _resumption.set(resumption)


def current_resumption() -> Resumption | None:
    """Return the values of the request that this task answers; None: it is not resumable."""
    return _resumption.get()


async def decided(name: str, decide: Callable[[], Awaitable[Any]]) -> Any:
    """Return the JSON value that `decide` returns; a resumable request is decided only once."""
    resumption = _resumption.get()
    if resumption is None:
        return await decide()
    if name in resumption.decisions:
        return resumption.decisions[name]
    return resumption.decide(name, await decide())


def id_chars(count: int, alphabet: str) -> str:
    """Return the characters of a new id: random ones, or the next of a resumable request."""
    resumption = _resumption.get()
    if resumption is not None:
        return resumption.next_chars(count, alphabet)
    return "".join(secrets.choice(alphabet) for _ in range(count))
