"""Log-probabilities on their way to a client: ids get their bytes."""

from array import array
from collections.abc import Callable, Iterable, Iterator

from quadriga.wire.messages.arrays import pack_floats, pack_ids, unpack_floats, unpack_ids
from quadriga.wire.messages.logprobs import LogprobBlock, Logprobs, PromptLogprobs, SampledLogprobs
from quadriga.wire.messages.to_detok import PromptLogprobsData

BytesOf = Callable[[int], bytes]
NOT_A_NUMBER = float("nan")


class LogprobCollector:
    """Log-probabilities of tokens, one after the other, with `width` of the likeliest of each.

    bytes_of: what a token stands for.
    """

    __slots__ = ("_bytes_of", "_ids", "_top_ids", "_top_values", "_values", "_width")

    def __init__(self, width: int, bytes_of: BytesOf) -> None:
        self._width = width
        self._bytes_of = bytes_of
        self._clear()

    def _clear(self) -> None:
        self._ids, self._values = array("i"), array("f")
        self._top_ids, self._top_values = array("i"), array("f")

    def add(self, token_id: int, entry: "Entry") -> None:
        """The entry has as many of the likeliest as the vocabulary or somebody else's wish left."""
        value, top_ids, top_values = entry
        width = self._width
        self._ids.append(token_id)
        self._values.append(value)
        lacking = width - len(top_ids)
        self._top_ids += top_ids[:width] + array("i", [-1] * lacking)
        self._top_values += top_values[:width] + array("f", [NOT_A_NUMBER] * lacking)

    def take(self) -> Logprobs:
        """All that were added since the last time."""
        told = Logprobs(
            pack_floats(self._values),
            self._width,
            pack_ids(self._top_ids),
            pack_floats(self._top_values),
            [self._bytes_of(i) for i in self._ids],
            [self._bytes_of(i) if i >= 0 else b"" for i in self._top_ids],
        )
        self._clear()
        return told


Entry = tuple[float, "array[int]", "array[float]"]
"""Of one token: its own log-probability, the likeliest ids, and theirs."""


def entries_by_row(told: SampledLogprobs | None) -> dict[int, Entry]:
    """By the token's place in its step."""
    if told is None:
        return {}
    return dict(zip(unpack_ids(told.rows), _entries(told.block), strict=True))


def prompt_logprobs_entries(prompt: PromptLogprobsData, bytes_of: BytesOf) -> PromptLogprobs:
    """All of a prompt's tokens; the first one follows nothing, so that it has no probability."""
    told, ids = LogprobCollector(prompt.width, bytes_of), unpack_ids(prompt.token_ids)
    first: Entry = (NOT_A_NUMBER, array("i"), array("f"))
    for token_id, entry in zip(ids, _chained(first, prompt.blocks), strict=True):
        told.add(token_id, entry)
    return PromptLogprobs(prompt.token_ids, told.take())


def entries_of(blocks: Iterable[LogprobBlock]) -> Iterator[Entry]:
    """Of all tokens, one after the other."""
    for block in blocks:
        yield from _entries(block)


def _chained(first: Entry, blocks: Iterable[LogprobBlock]) -> Iterator[Entry]:
    yield first
    yield from entries_of(blocks)


def _entries(block: LogprobBlock) -> Iterator[Entry]:
    width = block.width
    top_ids, top_values = unpack_ids(block.top_ids), unpack_floats(block.top_values)
    for index, value in enumerate(unpack_floats(block.values)):
        part = slice(index * width, (index + 1) * width)
        yield value, top_ids[part], top_values[part]
