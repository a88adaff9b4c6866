"""Logprobs on their way to a client: the bytes of each token are added to its id."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from quadriga.wire.logprobs import LogprobBlock, Logprobs, PromptLogprobs, SampledLogprobs
from quadriga.wire.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from quadriga.wire.to_detok import PromptLogprobsData

BytesOf = Callable[[int], bytes]
NAN = float("nan")


class TokenLogprobs(NamedTuple):
    """The logprob of one token, and the most likely ids at its place with their logprobs."""

    value: float
    top_ids: "array[int]"
    top_values: "array[float]"


class LogprobCollector:
    """Collect the logprobs of successive tokens until they are sent.

    Args:
        width: number of the most likely tokens that the client asked for.
        bytes_of: returns the bytes of a token id.
    """

    __slots__ = (
        "_bytes", "_bytes_of", "_ids", "_top_bytes", "_top_ids", "_top_values", "_values", "_width",
    )  # fmt: skip

    def __init__(self, width: int, bytes_of: BytesOf) -> None:
        self._width = width
        self._bytes_of = bytes_of
        self._clear()

    def _clear(self) -> None:
        self._ids, self._values = array("i"), array("f")
        self._top_ids, self._top_values = array("i"), array("f")
        self._bytes: list[bytes] = []
        self._top_bytes: list[bytes] = []

    def add(self, token_id: int, logprobs: TokenLogprobs) -> None:
        """Add a token.

        Other requests in the step may have asked for more of the most likely tokens, which are cut
        off; a small vocabulary may have fewer, and the rest is filled with -1 and NaN.
        """
        value, top_ids, top_values = logprobs
        width = self._width
        self._ids.append(token_id)
        self._values.append(value)
        self._bytes.append(self._bytes_of(token_id))
        num_missing = width - len(top_ids)
        top_ids = top_ids[:width] + array("i", [-1] * num_missing)
        self._top_ids += top_ids
        self._top_values += top_values[:width] + array("f", [NAN] * num_missing)
        self._top_bytes += [self._bytes_of(i) if i >= 0 else b"" for i in top_ids]

    def take(self) -> Logprobs:
        """Return all logprobs that were added since the last call."""
        logprobs = Logprobs(
            pack_floats(self._values),
            self._width,
            pack_ids(self._top_ids),
            pack_floats(self._top_values),
            self._bytes,
            self._top_bytes,
        )
        self._clear()
        return logprobs


def logprobs_by_row(sampled: SampledLogprobs | None) -> dict[int, TokenLogprobs]:
    """Return the logprobs of one step by the index of the token in its step."""
    if sampled is None:
        return {}
    return dict(zip(unpack_ids(sampled.rows), iterate_blocks([sampled.block]), strict=True))


class PromptLogprobCollector:
    """Collect the logprobs of a prompt, a token at a time, since a prompt may be long.

    Its first token follows nothing, and has NaN.
    """

    __slots__ = ("_collector", "_left", "_token_ids")

    def __init__(self, prompt: PromptLogprobsData, bytes_of: BytesOf) -> None:
        self._token_ids = prompt.token_ids
        self._collector = LogprobCollector(prompt.width, bytes_of)
        first = TokenLogprobs(NAN, array("i"), array("f"))
        all_logprobs = chain([first], iterate_blocks(prompt.blocks))
        self._left = zip(unpack_ids(prompt.token_ids), all_logprobs, strict=True)

    def advance(self) -> bool:
        """Add the next token. Return False once there is none."""
        for token_id, logprobs in self._left:
            self._collector.add(token_id, logprobs)
            return True
        return False

    def take(self) -> PromptLogprobs:
        """Return the logprobs of all tokens."""
        return PromptLogprobs(self._token_ids, self._collector.take())


def iterate_blocks(blocks: Iterable[LogprobBlock]) -> Iterator[TokenLogprobs]:
    """Yield the logprobs of one token after the other."""
    for block in blocks:
        width = block.width
        top_ids, top_values = unpack_ids(block.top_ids), unpack_floats(block.top_values)
        for index, value in enumerate(unpack_floats(block.values)):
            columns = slice(index * width, (index + 1) * width)
            yield TokenLogprobs(value, top_ids[columns], top_values[columns])
