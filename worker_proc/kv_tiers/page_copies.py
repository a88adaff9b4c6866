"""Copies of one page between its pieces in the pool and one piece of memory, with checksums.

`NativeCopies` are compiled (cpu/csrc/page_copies.cpp), for the machines that have the kernels of a
CPU; `NumpyCopies` give the same bytes anywhere.
"""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quadriga.server.processes.machine import NoCompiler
from worker_proc.cpu.build import kernels_at_hand, load_kernels

Bytes = NDArray[np.uint8]

# A checksum has, for each of 16 lanes of words of 32 bits, their sum and the sum of their sums:
# Fletcher's, which takes two additions for each vector of words.
GROUP_BYTES, NUM_SUMS = 64, 32


class Pieces:
    """Where the pieces of pages are: one for each part of a pool.

    Attributes:
        num_bytes: of a page, in all pieces together.
    """

    def __init__(self, parts: Sequence[Bytes]) -> None:
        """Take parts, each `[pages, bytes]`, one page after the other in memory."""
        self._parts = parts  # which keep the memory
        self._begins = np.array([part.ctypes.data for part in parts], dtype=np.int64)
        self._sizes = np.array([part.shape[1] for part in parts], dtype=np.int64)
        self.num_bytes = int(self._sizes.sum())
        # As the kernels take them, before the page and after it.
        self.arguments = (self._begins.ctypes.data, self._sizes.ctypes.data, len(parts))

    def of(self, page: int) -> list[Bytes]:
        """Return the memory of a page, in pieces."""
        return [part[page] for part in self._parts]


@dataclass(frozen=True)
class PagePlace:
    """Where a page is, or is to be written.

    Attributes:
        pieces: of all pages there.
        page: number of the page.
    """

    pieces: Pieces
    page: int

    @classmethod
    def at(cls, *buffers: Bytes) -> "PagePlace":
        """Return the place of a page that lies in buffers, one after the other."""
        return cls(Pieces([buffer[np.newaxis] for buffer in buffers]), 0)

    @cached_property
    def buffers(self) -> list[Bytes]:
        """The memory in pieces."""
        return self.pieces.of(self.page)


class Gathered(NamedTuple):
    """A page that was copied from its pieces.

    Attributes:
        largest_word: as in `PageCopies.largest_word`; 0 where it was not asked for.
        checksum: of the page.
    """

    largest_word: int
    checksum: bytes


class PageCopies(Protocol):
    """What is done with a page in one go."""

    def gather(self, source: PagePlace, target: Bytes, word_bytes: int) -> Gathered:
        """Copy a page to one piece of memory.

        Args:
            source: where it is.
            target: `[bytes]`.
            word_bytes: of the words of which the largest is returned; 0: it is not needed.
        """

    def scatter(self, source: Bytes, target: PagePlace) -> bytes:
        """Copy a page from one piece of memory, and return its checksum."""

    def checksum(self, page: Bytes) -> bytes:
        """Return the checksum of a page in one piece of memory."""

    def largest_word(self, source: PagePlace, word_bytes: int) -> int:
        """Return the largest word of a page, of 2 or 4 bytes, without its highest bit."""


class NumpyCopies:
    """The copies in numpy."""

    def gather(self, source: PagePlace, target: Bytes, word_bytes: int) -> Gathered:
        """Copy a page to one piece of memory."""
        np.concatenate(source.buffers, out=target)
        largest = self.largest_word(source, word_bytes) if word_bytes else 0
        return Gathered(largest, self.checksum(target))

    def scatter(self, source: Bytes, target: PagePlace) -> bytes:
        """Copy a page from one piece of memory, and return its checksum."""
        begin = 0
        for piece in target.buffers:
            np.copyto(piece, source[begin : begin + len(piece)])
            begin += len(piece)
        return self.checksum(np.concatenate(target.buffers))

    def checksum(self, page: Bytes) -> bytes:
        """Return the checksum of a page in one piece of memory."""
        padded = np.zeros(-(-len(page) // GROUP_BYTES) * GROUP_BYTES, dtype=np.uint8)
        padded[: len(page)] = page
        words = padded.view(np.uint32).reshape(-1, NUM_SUMS // 2).astype(np.uint64)
        weights = np.arange(len(words), 0, -1, dtype=np.uint64)
        return np.stack([words.sum(0), (words * weights[:, np.newaxis]).sum(0)]).tobytes()

    def largest_word(self, source: PagePlace, word_bytes: int) -> int:
        """Return the largest word of a page, of 2 or 4 bytes, without its highest bit."""
        word = np.dtype(f"u{word_bytes}")
        magnitude = word.type((1 << 8 * word_bytes - 1) - 1)
        return max(int((piece.view(word) & magnitude).max()) for piece in source.buffers)


class NativeCopies:
    """The compiled copies. They are for one thread at a time, and hold no lock of Python's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        pieces = (pointer, pointer, number, number)

        def function(name: str, *arguments: Any, returns: Any = None) -> Any:
            # Functions of a library are shared by all who look them up: this one is its own.
            found = library[name]
            found.argtypes, found.restype = arguments, returns
            return found

        self._gather = function(
            "quadriga_gather_page", *pieces, pointer, number, pointer, returns=ctypes.c_uint32
        )
        self._scatter = function("quadriga_scatter_page", *pieces, pointer, pointer)
        self._sum = function("quadriga_sum_page", pointer, number, pointer)
        self._largest = function(
            "quadriga_largest_of_page", *pieces, number, returns=ctypes.c_uint32
        )
        self._sums = np.zeros(NUM_SUMS, dtype=np.uint64)
        self._sums_address = self._sums.ctypes.data

    def gather(self, source: PagePlace, target: Bytes, word_bytes: int) -> Gathered:
        """Copy a page to one piece of memory."""
        largest = self._gather(
            *source.pieces.arguments, source.page, target.ctypes.data, word_bytes,
            self._sums_address,
        )  # fmt: skip
        return Gathered(largest, self._sums.tobytes())

    def scatter(self, source: Bytes, target: PagePlace) -> bytes:
        """Copy a page from one piece of memory, and return its checksum."""
        self._scatter(*target.pieces.arguments, target.page, source.ctypes.data, self._sums_address)
        return self._sums.tobytes()

    def checksum(self, page: Bytes) -> bytes:
        """Return the checksum of a page in one piece of memory."""
        self._sum(page.ctypes.data, page.nbytes, self._sums_address)
        return self._sums.tobytes()

    def largest_word(self, source: PagePlace, word_bytes: int) -> int:
        """Return the largest word of a page, of 2 or 4 bytes, without its highest bit."""
        found: int = self._largest(*source.pieces.arguments, source.page, word_bytes)
        return found


def page_copies(may_compile: bool = False) -> PageCopies:
    """Return the compiled copies, or those in numpy where there are none.

    Args:
        may_compile: compile the kernels if that was not done yet.
    """
    if not may_compile:
        library = kernels_at_hand()
        return NumpyCopies() if library is None else NativeCopies(library)
    try:
        return NativeCopies(load_kernels())
    except NoCompiler as error:
        logging.warning("KV pages move slowly, as there are no compiled kernels: %s", error)
        return NumpyCopies()
