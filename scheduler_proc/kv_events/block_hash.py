"""The hashes of blocks by which routers compare prompts with caches: vLLM's `sha256_cbor`.

A hash is the SHA-256 of the canonical CBOR (RFC 8949, section 4.2.1) of the array
[hash of the block before, token ids, extra keys or null]. Before the first block stands the hash of
a seed, which vLLM takes from the variable PYTHONHASHSEED.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

DEFAULT_SEED = "0"
_BEFORE_PARENT = b"\x83\x58\x20"  # an array of 3 items, of which the first has 32 bytes
_NULL = b"\xf6"
_UNSIGNED, _TEXT, _ARRAY = 0, 3, 4  # major types of CBOR


def root_hash() -> bytes:
    """Return what stands for the hash of the block before the first one."""
    return sha256(_text(os.environ.get("PYTHONHASHSEED", DEFAULT_SEED))).digest()


def block_hash(
    parent: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...] | None
) -> bytes:
    """Return the hash of a block.

    Args:
        parent: hash of the block before it, or `root_hash`.
        token_ids: of the block.
        extra_keys: the adapter's name, and of the first block the cache salt; None: neither.
    """
    parts = [_BEFORE_PARENT, parent, _head(_ARRAY, len(token_ids))]
    parts += map(_unsigned, token_ids)
    if extra_keys is None:
        parts.append(_NULL)
    else:
        parts += [_head(_ARRAY, len(extra_keys)), *map(_text, extra_keys)]
    return sha256(b"".join(parts)).digest()


@lru_cache(1 << 18)
def _unsigned(value: int) -> bytes:
    return _head(_UNSIGNED, value)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _head(_TEXT, len(encoded)) + encoded


def _head(major: int, value: int) -> bytes:
    """Return a type and a number in as few bytes as possible."""
    if value < 24:
        return bytes([major << 5 | value])
    for power in range(3):
        if value < 1 << (8 << power):
            return bytes([major << 5 | 24 + power]) + value.to_bytes(1 << power, "big")
    return bytes([major << 5 | 27]) + value.to_bytes(8, "big")
