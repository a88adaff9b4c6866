"""The one order of the tokens of several choices that depends on nothing but them."""

from collections import deque
from collections.abc import Iterable, Iterator

from quadriga.client.types import StreamChunk

Chunks = list[tuple[int, StreamChunk]]


class TokenOrder:
    """Cut chunks into single tokens and ends, and put those of all choices in turns.

    First comes the first token of each choice, then the second of each, and so on. A choice that is
    ahead of another waits; one that has ended is left out.

    Args:
        num_choices: number of choices, of all prompts together.
    """

    def __init__(self, num_choices: int) -> None:
        self._pieces: list[deque[StreamChunk]] = [deque() for _ in range(num_choices)]
        self._open = list(range(num_choices))
        self._turn = 0

    def push(self, chunks: Iterable[tuple[int, StreamChunk]]) -> Chunks:
        """Take the next chunks, by choice, and return the pieces whose turn it is."""
        for choice, chunk in chunks:
            self._pieces[choice].extend(tokens_of(chunk))
        ready: Chunks = []
        while self._open and (pieces := self._pieces[self._open[self._turn]]):
            piece = pieces.popleft()
            ready.append((self._open[self._turn], piece))
            if piece.completion is None:
                self._turn += 1
            else:
                del self._open[self._turn]
            self._turn = self._turn % len(self._open) if self._open else 0
        return ready


def tokens_of(chunk: StreamChunk) -> Iterator[StreamChunk]:
    """Yield a chunk for each token of a chunk, and one for the end of the choice if it is there."""
    if chunk.completion is None and len(chunk.token_ids) <= 1:
        yield chunk
        return
    lengths = chunk.text_lengths
    if lengths is None or len(lengths) != len(chunk.token_ids):  # as of a prompt alone
        lengths = [0] * len(chunk.token_ids)
    position, prompt_logprobs = 0, chunk.prompt_logprobs
    for index, length in enumerate(lengths):
        yield StreamChunk(
            chunk.request_id,
            chunk.text[position : position + length],
            chunk.token_ids[index : index + 1],
            chunk.token_times[index : index + 1],
            chunk.received_at,
            index=chunk.index,
            logprobs=None if chunk.logprobs is None else chunk.logprobs[index : index + 1],
            prompt_logprobs=prompt_logprobs,
        )
        position, prompt_logprobs = position + length, None
    if chunk.completion is not None:
        yield StreamChunk(
            chunk.request_id,
            chunk.text[position:],
            [],
            [],
            chunk.received_at,
            chunk.completion,
            chunk.index,
            None if chunk.logprobs is None else [],
            prompt_logprobs,
        )
