"""The last batches of events, and the state before them: what a subscriber can be sent again."""

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from quadriga.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
)

MAX_LOG_BYTES = 256 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class BatchLog:
    """Keep batches by their sequence numbers, which follow each other.

    A batch that leaves is carried out on the state before the others. So a subscriber that asks for
    what is gone gets that state as one batch, with the number before the oldest one.

    Args:
        max_batches: number of batches that are kept.
        max_bytes: of all of them.
    """

    def __init__(self, max_batches: int, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: OrderedDict[int, bytes] = OrderedDict()
        self._first = 0  # number of the oldest batch, or of the next one where there is none
        self._num_bytes = 0
        self._blocks: dict[bytes, BlockStored] = {}  # the state before the oldest batch
        self._before: KVEventBatch | None = None  # the last batch that has left

    def append(self, sequence: int, payload: bytes) -> None:
        """Take in the next batch."""
        if not self._batches:
            self._first = sequence
        self._batches[sequence] = payload
        self._num_bytes += len(payload)
        while len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes:
            _sequence, oldest = self._batches.popitem(last=False)
            self._num_bytes -= len(oldest)
            self._first += 1
            self._carry_out(_decode(oldest))

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Yield the batches from a number on, each with its own. The log may grow meanwhile."""
        number = sequence
        while True:
            if number < self._first:
                number = self._first
                if self._before is not None:
                    yield number - 1, self._state()
                    continue
            payload = self._batches.get(number)
            if payload is None:
                return
            yield number, payload
            number += 1

    def _carry_out(self, batch: KVEventBatch) -> None:
        self._before = batch
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self._blocks.clear()
                case BlockRemoved():
                    for found in event.block_hashes:
                        self._blocks.pop(found, None)
                case BlockStored():
                    self._blocks.update(_single_blocks(event))

    def _state(self) -> bytes:
        """Return a batch that leads from any state to that before the oldest batch."""
        assert self._before is not None
        events: list[Event] = [AllBlocksCleared(), *self._blocks.values()]
        return _encode(KVEventBatch(self._before.ts, events, self._before.data_parallel_rank))


def _single_blocks(event: BlockStored) -> Iterator[tuple[bytes, BlockStored]]:
    """Yield an event for each block of an event, by its hash."""
    size, parent = event.block_size, event.parent_block_hash
    for number, found in enumerate(event.block_hashes):
        yield (
            found,
            msgspec.structs.replace(
                event,
                block_hashes=[found],
                parent_block_hash=parent,
                token_ids=event.token_ids[number * size : (number + 1) * size],
                extra_keys=event.extra_keys and event.extra_keys[number : number + 1],
            ),
        )
        parent = found
