"""The journal's frames, and how they are read back."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import msgspec

from quadriga.errors import ConfigError
from quadriga.messages.arrays import unpack_ids
from quadriga.messages.logprobs import LogprobBlock
from quadriga.messages.public import ErrorInfo
from quadriga.messages.to_scheduler import Submit
from scheduler_proc.request import Request, Status

READ_BYTES = 1 << 20


class Accepted(msgspec.Struct, array_like=True):
    """seq: of its first choice; the others have the numbers after it. indexes: of its choices."""

    seq: int
    message: Submit
    indexes: list[int]


class Tokens(msgspec.Struct, array_like=True):
    """As in StepOutput."""

    seqs: list[int]
    token_ids: bytes
    time: float


class Told(msgspec.Struct, array_like=True):
    """Log-probabilities of a request, where its client wants them: of tokens that it generated, a
    block each, and of its prompt."""

    seq: int
    tokens: list[LogprobBlock] = []
    prompt: list[LogprobBlock] = []


class Ended(msgspec.Struct, array_like=True):
    """How a request ended, as in CloseText."""

    seq: int
    finish_reason: str
    matched_stop: int | None
    error: ErrorInfo | None
    cached_tokens: int
    admitted: float


class Round(msgspec.Struct, array_like=True):
    """All of a round, in this order. settled: those whose end the detokenizer has handed on."""

    accepted: list[Accepted] = []
    tokens: list[Tokens] = []
    told: list[Told] = []
    ended: list[Ended] = []
    settled: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not (self.accepted or self.tokens or self.told or self.ended or self.settled)


def ended_of(request: Request) -> Ended:
    return Ended(
        request.seq,
        request.finish_reason,
        request.matched_stop,
        request.error,
        request.cached_tokens,
        request.admitted,
    )


@dataclass(slots=True)
class Found:
    """A choice of a request, as far as the journal knows it. first_token: Unix seconds."""

    seq: int
    index: int
    message: Submit
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    told: Told = field(default_factory=lambda: Told(-1, [], []))
    first_token: float = 0.0
    ended: Ended | None = None
    settled: bool = False


class Contents(NamedTuple):
    """run: which one wrote. found: by number, in order; requests that nobody needs are left out."""

    run: str
    found: list[Found]

    @property
    def unfinished(self) -> int:
        return sum(one.ended is None for one in self.found)


def read_journal(path: Path) -> Contents:
    """All whole frames of a file; what follows the last one was torn off. Nothing where there is no
    file. ConfigError for one that is no journal."""
    if not path.exists():
        return Contents("", [])
    frames = _frames(path)
    run = next(frames, "")
    if not isinstance(run, str):
        raise ConfigError(f"{path} is no journal: remove it, or choose another --journal")
    found: dict[int, Found] = {}
    for frame in frames:
        try:
            _apply(msgspec.convert(frame, Round), found)
        except (msgspec.ValidationError, KeyError):
            break
    return Contents(run, [found[seq] for seq in sorted(found)])


def _frames(path: Path) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            unpacker.feed(data)
            try:
                yield from unpacker
            except (msgpack.UnpackException, ValueError):
                return


def _apply(told: Round, found: dict[int, Found]) -> None:
    for accepted in told.accepted:
        for index in accepted.indexes:
            seq = accepted.seq + index
            found[seq] = Found(seq, index, accepted.message)
    for step in told.tokens:
        for seq, token in zip(step.seqs, unpack_ids(step.token_ids), strict=True):
            one = found[seq]
            one.tokens.append(token)
            one.first_token = one.first_token or step.time
    for one_told in told.told:
        found[one_told.seq].told.tokens += one_told.tokens
        found[one_told.seq].told.prompt += one_told.prompt
    for ended in told.ended:
        found[ended.seq].ended = ended
    for seq in told.settled:
        if seq in found:
            found[seq].settled = True


def restored(found: Found, eos_ids: frozenset[int]) -> Request:
    """The request as the scheduler had it, waiting or ended."""
    request = Request.from_submit(found.seq, found.message, eos_ids, found.index)
    request.tokens += found.tokens
    request.known = len(request.tokens)
    request.first_token = found.first_token
    request.told, request.prompt_logprobs = found.told.tokens, found.told.prompt
    ended = found.ended
    if ended is not None:
        request.status, request.finish_reason = Status.FINISHED, ended.finish_reason
        request.matched_stop, request.error = ended.matched_stop, ended.error
        request.cached_tokens, request.admitted = ended.cached_tokens, ended.admitted
    return request
