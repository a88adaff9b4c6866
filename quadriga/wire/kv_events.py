"""Events of the prefix cache, as routers read them: the format of vLLM 0.32.

A message has the frames topic, sequence number (8 bytes, big-endian) and a KVEventBatch. Its fields
and their order are vLLM's; what it has for other kinds of caches stays out.
"""

from typing import TypeAlias

import msgspec

SEQUENCE_BYTES = 8
# Stands for the sequence number of the message that ends a replay; its last frame is empty.
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MEDIUM = "GPU"  # vLLM's name for the KV pool that the worker computes with


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Base class of the events; the tag is the name of the class."""


class BlockStored(KVCacheEvent):
    """Blocks that follow each other are in the cache.

    Attributes:
        block_hashes: of the blocks, as block_hash gives them.
        parent_block_hash: of the block before the first one; None: it begins a prompt.
        token_ids: of all the blocks.
        block_size: tokens of one.
        lora_id: number of the adapter, from 1 on; None: the model itself.
        medium: where the block is.
        lora_name: name of the adapter.
        extra_keys: what the hash of each block covers beside its tokens; None: nothing in any.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks are not in the cache any more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    """The cache is empty."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events in their order.

    Attributes:
        ts: Unix seconds.
        data_parallel_rank: number of the replica.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
