"""What makes a resumable request the same again, for a gateway that replaces another.

Everything that a gateway would draw at random or read from a clock is a function of these values,
so that the events of an answer are a function of its tokens alone.
"""

import hashlib
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from quadriga.client.types import KeptRequest
from quadriga.sampling.limits import MAX_SEED
from quadriga.sampling.params import SamplingParams

NUM_KEY_BYTES = 16


@dataclass(slots=True)
class Resumption:
    """The values of one request.

    Attributes:
        key: unique for ever; the ids of the ring's requests, seeds and ids of calls come from it.
        created: Unix seconds, for the field `created` of the answer.
        keep_s: seconds for which the ring goes on without a gateway.
        is_resent: a gateway before this one has sent it to the ring.
    """

    key: str
    created: int
    keep_s: float
    is_resent: bool = False
    _num_ids: int = 0

    def kept_request(self, index: int) -> KeptRequest:
        """Return how the ring knows prompt number `index`."""
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

    def _number(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.key} {name}".encode()).digest(), "little")


def new_key() -> str:
    """Return the key of a new request."""
    return secrets.token_hex(NUM_KEY_BYTES)


_resumption: ContextVar[Resumption | None] = ContextVar("resumption", default=None)


def set_resumption(resumption: Resumption) -> None:
    """Set the values of the request that this task answers from now on."""
    _resumption.set(resumption)


def current_resumption() -> Resumption | None:
    """Return the values of the request that this task answers; None: it is not resumable."""
    return _resumption.get()


def id_chars(count: int, alphabet: str) -> str:
    """Return the characters of a new id: random ones, or the next of a resumable request."""
    resumption = _resumption.get()
    if resumption is not None:
        return resumption.next_chars(count, alphabet)
    return "".join(secrets.choice(alphabet) for _ in range(count))
