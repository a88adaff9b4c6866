"""Hashes of the blocks of a prompt, by which a router finds the replica that has computed it.

A block is the smallest number of whole pages with at least MIN_BLOCK_TOKENS tokens. Its hash covers
everything before it, too, so that equal hashes mean equal beginnings.
"""

from collections.abc import Iterator
from hashlib import blake2b

MIN_BLOCK_TOKENS = 64
HASH_BYTES = 8
PAGE_HASH_BYTES = 16  # of the name of a page's content, which must not be that of another one
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


def page_hash(parent: bytes, tokens: bytes) -> bytes:
    """Return the name of the content of a page: as block_hash, but long enough to be unique."""
    return blake2b(parent + tokens, digest_size=PAGE_HASH_BYTES).digest()


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


def split_hashes(joined: bytes, size: int = HASH_BYTES) -> Iterator[bytes]:
    """Yield the hashes of a message, each of `size` bytes."""
    for start in range(0, len(joined), size):
        yield joined[start : start + size]
