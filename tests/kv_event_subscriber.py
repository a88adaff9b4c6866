"""A subscriber of KV events, written from vLLM's documentation of them alone.

https://docs.vllm.ai/en/latest/examples/features/kv_events has the frames, the fields and how a gap
is replayed. The socket for replays is a DEALER, since a REQ socket takes one answer only.
"""

from typing import Any

import msgpack
import zmq

END_OF_REPLAY = b""


class KVEventSubscriber:
    """Follow the events of one replica.

    Args:
        endpoint: of the PUB socket.
        replay_endpoint: of the ROUTER socket.
        topic: what it subscribes to.

    Attributes:
        blocks: the events' fields of each block that is in the cache, by its hash.
        num_replayed: number of batches that came by replays.
        num_cleared: number of times that the cache was emptied.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._last = -1
        self._num_received = 0
        self.lose_every = 0
        self.blocks: dict[bytes, dict[str, Any]] = {}
        self.num_replayed = 0
        self.num_cleared = 0

    def receive(self, timeout_s: float) -> bool:
        """Take in the next message. Return False if none comes in time."""
        if not self._sub.poll(round(timeout_s * 1000)):
            return False
        topic, sequence_bytes, payload = self._sub.recv_multipart()
        assert topic == self._topic and len(sequence_bytes) == 8
        self._num_received += 1
        if self.lose_every and self._num_received % self.lose_every == 0:
            return True  # as if the network had lost it
        sequence = int.from_bytes(sequence_bytes, "big")
        if sequence > self._last + 1:
            self.replay()
        if sequence > self._last:
            self._take_in(sequence, payload)
        return True

    def replay(self, timeout_s: float = 10.0) -> None:
        """Ask for everything after the last message, and take it in."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", (self._last + 1).to_bytes(8, "big")))
            while True:
                assert socket.poll(round(timeout_s * 1000)), "a replay does not end"
                _, sequence_bytes, payload = socket.recv_multipart()
                if payload == END_OF_REPLAY:
                    assert int.from_bytes(sequence_bytes, "big", signed=True) == -1
                    return
                sequence = int.from_bytes(sequence_bytes, "big")
                if sequence > self._last:
                    self.num_replayed += 1
                    self._take_in(sequence, payload)
        finally:
            socket.close()

    def _take_in(self, sequence: int, payload: bytes) -> None:
        self._last = sequence
        _ts, events, *_rank = msgpack.unpackb(payload)
        for tag, *fields in events:
            if tag == "AllBlocksCleared":
                self.blocks.clear()
                self.num_cleared += 1
            elif tag == "BlockRemoved":
                for found in fields[0]:
                    del self.blocks[found]
            else:
                assert tag == "BlockStored"
                self._store(*fields)

    def _store(
        self,
        hashes: list[bytes],
        parent: bytes | None,
        token_ids: list[int],
        block_size: int,
        lora_id: int | None,
        medium: str | None,
        lora_name: str | None,
        extra_keys: list[Any] | None = None,
        *_more: Any,
    ) -> None:
        assert len(token_ids) == len(hashes) * block_size
        assert medium == "GPU" and (lora_id is None) == (lora_name is None)
        for number, found in enumerate(hashes):
            assert found not in self.blocks
            keys = extra_keys[number] if extra_keys else None
            self.blocks[found] = {
                "parent": parent,
                "token_ids": token_ids[number * block_size : (number + 1) * block_size],
                "lora_name": lora_name,
                "extra_keys": None if keys is None else tuple(keys),
            }
            parent = found

    def close(self) -> None:
        """Close the sockets."""
        self._sub.close()
        self._context.term()
