"""Publish the events of the prefix cache: from the scheduler's loop to a thread, to subscribers.

`KVEvents` is what the scheduler knows. Sockets belong to a thread, so that no subscriber and no
replay delays a step. `BatchLog` has what a subscriber can be sent again.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import zmq

from quadriga.errors import AddressInUse
from quadriga.server.config.kv_events import KVEventsConfig
from quadriga.wire.kv_events import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
)
from quadriga.wire.sockets import IPC
from scheduler_proc.kv_events.tree_events import TreeEvents, root_hash
from scheduler_proc.state.kv_cache import KVCache

_HANDOVER = "inproc://batches"
_STOP = b""
LINGER_MS = 1000
CLOSE_S = 2.0
RETRY_MS = 20  # between two tries to send to a subscriber that reads its replay slowly
MAX_REPLAYED_AT_ONCE = 100  # batches between two looks at new ones
MAX_REPLAYS = 64  # further subscribers replace the one that has waited longest


class KVEvents:
    """Publish what happens in the pools of one scheduler.

    Sequence numbers begin with the time in microseconds: so those of a scheduler that was started
    again are larger than all before, and a subscriber sees a gap, whose replay begins with
    AllBlocksCleared.

    Args:
        config: of this replica.
        rank: number of the replica.
        clock: Unix time in seconds.
        adapter_name: as in TreeEvents.

    Raises:
        AddressInUse: an endpoint cannot be bound.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        rank: int,
        clock: Callable[[], float],
        adapter_name: Callable[[str], str | None],
    ) -> None:
        self._tree = TreeEvents(root_hash(), adapter_name)
        self._rank = rank
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._sequence = int(clock() * 1e6)
        self._is_behind = False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context = context
        self._handover = context.socket(zmq.PUSH)
        self._handover.set_hwm(config.max_queue_size)
        self._handover.bind(_HANDOVER)
        self._thread = threading.Thread(
            target=_Publisher(config, context).run, name="kv-events", daemon=True
        )
        self._thread.start()

    def watch(self, kv: KVCache) -> None:
        """Begin with a new, empty pool."""
        self._tree.watch(kv)

    def publish(self) -> None:
        """Publish the events since the last call.

        Where the thread lags behind, they are dropped, and later ones restate the whole tree.
        """
        if self._is_behind:
            if not self._handover.poll(0, zmq.POLLOUT):
                self._tree.take()
                return
            self._is_behind = False
            self._tree.restate()
        events = self._tree.take()
        if not events:
            return
        payload = self._encode(KVEventBatch(self._clock(), events, self._rank))
        sequence = self._sequence.to_bytes(SEQUENCE_BYTES, "big")
        try:
            self._handover.send_multipart((sequence, payload), zmq.NOBLOCK)
        except zmq.Again:
            self._is_behind = True
        else:
            self._sequence += 1

    def close(self) -> None:
        """Publish what is left, and end the thread."""
        with suppress(zmq.Again):
            self._handover.send_multipart((_STOP, b""), zmq.NOBLOCK)
        self._thread.join(CLOSE_S)
        self._handover.close(0)
        if not self._thread.is_alive():
            self._context.term()


class _Publisher:
    """The thread: a PUB socket for new batches, and a ROUTER socket for those before."""

    def __init__(self, config: KVEventsConfig, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._topic = config.topic.encode()
        self._log = BatchLog(config.buffer_steps)
        self._batches = context.socket(zmq.PULL)
        self._batches.set_hwm(1)  # the other end has the queue
        self._batches.connect(_HANDOVER)
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.setsockopt(zmq.LINGER, LINGER_MS)
        if "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith(IPC):
            _bind(self._pub, config.endpoint)
        else:
            self._pub.connect(config.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._batches, zmq.POLLIN)
        self._replays: OrderedDict[bytes, Iterator[tuple[bytes, bytes]]] = OrderedDict()
        self._unsent: dict[bytes, tuple[bytes, bytes]] = {}
        self._router: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._router = context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            _bind(self._router, config.replay_endpoint)
            self._poller.register(self._router, zmq.POLLIN)

    def run(self) -> None:
        """Publish until the scheduler ends."""
        try:
            while self._step():
                pass
        except Exception:
            logging.exception("KV events are not published any more")
        for socket in (self._batches, self._pub, self._router):
            if socket is not None:
                socket.close()

    def _step(self) -> bool:
        """Wait for something, and do it. Return False at the end."""
        timeout_ms = None
        if self._replays:
            timeout_ms = RETRY_MS if len(self._unsent) == len(self._replays) else 0
        ready = dict(self._poller.poll(timeout_ms))
        if self._router is not None and self._router in ready:
            self._on_request(self._router)
        if self._batches in ready:
            sequence, payload = self._batches.recv_multipart()
            if sequence == _STOP:
                return False
            self._pub.send_multipart((self._topic, sequence, payload))
            self._log.append(int.from_bytes(sequence, "big"), payload)
        if self._router is not None:
            for client in list(self._replays):
                self._continue_replay(self._router, client)
        return True

    def _on_request(self, router: "zmq.Socket[bytes]") -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            logging.warning("a request for a replay of KV events has %d frames", len(frames))
            return
        client, _, sequence = frames
        self._forget(client)
        if len(self._replays) == MAX_REPLAYS:
            self._forget(next(iter(self._replays)))
        self._replays[client] = self._messages(int.from_bytes(sequence, "big"))

    def _messages(self, sequence: int) -> Iterator[tuple[bytes, bytes]]:
        for number, payload in self._log.since(sequence):
            yield number.to_bytes(SEQUENCE_BYTES, "big"), payload
        yield END_OF_REPLAY, b""

    def _continue_replay(self, router: "zmq.Socket[bytes]", client: bytes) -> None:
        """Send the next messages of a replay, as far as its subscriber reads them."""
        for _ in range(MAX_REPLAYED_AT_ONCE):
            message = self._unsent.pop(client, None) or next(self._replays[client], None)
            if message is None:
                self._forget(client)
                return
            try:
                router.send_multipart((client, b"", *message), zmq.NOBLOCK)
            except zmq.Again:
                self._unsent[client] = message
                return
            except zmq.ZMQError:  # it has gone
                self._forget(client)
                return

    def _forget(self, client: bytes) -> None:
        self._replays.pop(client, None)
        self._unsent.pop(client, None)


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise AddressInUse(f"--kv-events-config: {endpoint} cannot be bound: {error}") from None


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
