"""Hashes of the blocks of a prompt, by which a router finds the replica that has computed it.

A block is the smallest number of whole pages with at least MIN_BLOCK_TOKENS tokens. Its hash covers
everything before it, too, so that equal hashes mean equal beginnings.
"""

from collections.abc import Iterator
from hashlib import blake2b

MIN_BLOCK_TOKENS = 64
HASH_BYTES = 8
TOKEN_BYTES = 4


def pages_per_block(page_size: int) -> int:
    """Return the number of pages of a block."""
    return max(1, -(-MIN_BLOCK_TOKENS // page_size))


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block.

    Args:
        parent: hash of the block before it; empty for the first one.
        tokens: its token ids as int32; those of the first block follow the cache salt.
    """
    return blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


def block_hashes(token_ids: bytes, block_tokens: int, salt: bytes = b"") -> list[bytes]:
    """Return the hashes of the whole blocks of a prompt that may come from a cache.

    The last token is always computed, so a block that ends with it does not count.
    """
    size = block_tokens * TOKEN_BYTES
    hashes: list[bytes] = []
    parent = b""
    for end in range(size, len(token_ids), size):
        tokens = token_ids[end - size : end]
        parent = block_hash(parent, tokens if hashes else salt + tokens)
        hashes.append(parent)
    return hashes


def split_hashes(joined: bytes) -> Iterator[bytes]:
    """Yield the hashes of a message."""
    for start in range(0, len(joined), HASH_BYTES):
        yield joined[start : start + HASH_BYTES]
