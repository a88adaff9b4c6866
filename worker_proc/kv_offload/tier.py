"""The contract of a tier: a bounded store of pages by their names."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from worker_proc.kv_offload.pool_pages import Bytes


class Tier(Protocol):
    """Pages by their names. All pages have one size. It is used by one thread at a time.

    Attributes:
        num_damaged: Number of pages that were found changed since they were written.
        has_failed: Whether it takes no pages at present.
    """

    num_damaged: int
    has_failed: bool

    def names(self) -> Iterable[bytes]:
        """Return the names of all pages, the least recently used first."""

    def __contains__(self, name: bytes) -> bool: ...

    def read(self, name: bytes, buffers: Sequence[Bytes]) -> bool:
        """Copy a page to memory in pieces.

        Returns:
            False if the page is not there, or is not what was written. It is forgotten then, and
            the memory holds anything.
        """

    def write(self, name: bytes, page: Bytes) -> list[bytes]:
        """Take a page in. Return the names of those that made room for it, or its own."""
