"""Access to the pages of the pool for the thread that moves them to the tiers and back.

`PoolPages` is the contract; `HostPool` is a pool in the computer's memory, `DevicePool` one on a
GPU. A GPU copies pages on a `CopyStream` of its own, beside the steps: it gathers a batch of pages
into one staging tensor, whose rows then go to pinned memory, or come from there and are scattered.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_proc.kv_tiers.page_copies import Bytes, PageCopies, PagePlace, Pieces, page_copies
from worker_proc.models.transfer import send


class PageCopy(ABC):
    """A copy of a batch of pages that was begun.

    Attributes:
        checksums: of each page, where they were made in the same go, as `PageCopies` has them.
    """

    checksums: Sequence[bytes] | None = None

    @abstractmethod
    def wait(self) -> list[bool]:
        """Wait for the end of the copy.

        Returns:
            Of each page whether no number of it is NaN or infinite.
        """

    @abstractmethod
    def hold_steps(self) -> None:
        """Let no step that is launched from now on, by this thread, run before the copy's end."""


class PageMemory(Protocol):
    """Memory of the host for pages, beyond that of this process."""

    def back_all(self) -> Bytes:
        """Make all of it usable, as far as the machine has memory, and return it."""

    def take(self) -> Bytes | None:
        """Return memory for a page, `[page_bytes]`; None: there is no more."""


class PoolPages(ABC):
    """The pages of a pool. All pages have one size.

    Attributes:
        page_bytes: size of a page, in all layers together.
        max_batch: pages of one copy at most.
    """

    page_bytes: int
    max_batch: int

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._memory: PageMemory | None = None

    def take_from(self, memory: PageMemory) -> None:
        """Take buffers from a memory, as long as it has any, from the first one on."""
        self._memory = memory
        self._free.clear()

    def reserve(self, count: int) -> None:  # noqa: B027 (most memory is allocated where it is used)
        """Allocate buffers for so many pages, if that takes long."""

    def take_buffer(self) -> Bytes:
        """Return memory of the host for a page, `[page_bytes]`."""
        if self._free:
            return self._free.pop()
        shared = None if self._memory is None else self._memory.take()
        return self._allocate() if shared is None else shared

    def give_back(self, buffers: Iterable[Bytes]) -> None:
        """Take buffers back that no copy uses."""
        self._free += buffers

    def _allocate(self) -> Bytes:
        return np.empty(self.page_bytes, dtype=np.uint8)

    @abstractmethod
    def place_of(self, page: int) -> PagePlace | None:
        """Return the place of a page; None if the host cannot write to it."""

    @abstractmethod
    def begin_copy_out(self, pages: Sequence[int], buffers: Sequence[Bytes]) -> PageCopy:
        """Copy pages that no step in flight writes to into buffers."""

    @abstractmethod
    def begin_copy_in(self, pages: Sequence[int], sources: Sequence[Bytes | None]) -> PageCopy:
        """Copy pages to places that no step in flight uses.

        Args:
            pages: the places.
            sources: `[page_bytes]` for each, which must not change before the copy's end; None: the
                page was written to `place_of` it.
        """


def are_finite(pages: Tensor) -> Tensor:
    """Return `[pages]` whether no number of a page is NaN or infinite.

    Args:
        pages: `[pages, numbers]`. Numbers that are not floating-point are finite.
    """
    if not pages.is_floating_point():
        return pages.new_ones(len(pages), dtype=torch.bool)
    if pages.dtype == torch.float8_e4m3fn:  # has no infinity, and two codes of NaN: 7F and FF
        positive = pages.view(torch.int8).amax(1) == 0x7F
        negative = pages.view(torch.uint8).amax(1) == 0xFF
        return ~(positive | negative)
    lowest, highest = pages.aminmax(dim=1)
    return lowest.isfinite() & highest.isfinite()


# Of each number format: a word of a number, and without its sign infinity, beyond which are the
# NaNs. float8_e4m3fn has no infinity, but a NaN there.
INFINITIES = {
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float8_e4m3fn: (torch.int8, np.uint8, 0x7F),
}


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of a part of a pool, as words whose largest one says whether all are finite.

    Attributes:
        words: `[pages, …]`.
        infinity: the word of infinity; the largest word of finite numbers is smaller.
    """

    words: NDArray[Any]
    infinity: int

    @classmethod
    def of(cls, numbers: Tensor) -> "_Numbers | None":
        """Return the words of numbers `[pages, …]`; None where every one is finite."""
        if not numbers.is_floating_point():
            return None
        signed, unsigned, infinity = INFINITIES[numbers.dtype]
        return cls(numbers.view(signed).numpy().view(unsigned), infinity)

    def are_finite(self, page: int) -> bool:
        """Return whether no number of a page is NaN or infinite."""
        words = self.words[page]
        sign = 1 << 8 * words.itemsize - 1
        return bool((words & words.dtype.type(sign - 1)).max() < self.infinity)


@dataclass(frozen=True, slots=True)
class _EndedCopy(PageCopy):
    """A copy that had ended when it was begun."""

    finite: list[bool]
    checksums: Sequence[bytes] | None = None

    def wait(self) -> list[bool]:
        return self.finite

    def hold_steps(self) -> None:
        pass


# A step may wait for the copy of a batch.
MAX_HOST_BATCH, HOST_BATCH_BYTES = 8, 2**21


class HostPool(PoolPages):
    """A pool in the computer's memory, which the thread copies itself."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        numbers: Sequence[Tensor] | None = None,
        copies: PageCopies | None = None,
    ) -> None:
        """Initialize.

        Args:
            parts: what `Engine.kv_parts` returns.
            numbers: what `Engine.kv_numbers` returns; None: the parts.
            copies: what copies pages; None: the fastest here.
        """
        super().__init__()
        self._copies = page_copies() if copies is None else copies
        self._pieces = Pieces([part.flatten(1).view(torch.uint8).numpy() for part in parts])
        self.page_bytes = self._pieces.num_bytes
        self.max_batch = max(1, min(MAX_HOST_BATCH, HOST_BATCH_BYTES // self.page_bytes))
        # Numbers that fill a page are looked at while it is copied, others part by part.
        whole = parts if numbers is None else numbers
        fills = all(n.is_contiguous() and n.nbytes == part.nbytes for n, part in zip(whole, parts))  # noqa: B905
        self._format: tuple[int, int] | None = None
        if fills and whole[0].is_floating_point():
            word, _unsigned, infinity = INFINITIES[whole[0].dtype]
            self._format = word.itemsize, infinity
        found = [_Numbers.of(part) for part in whole]
        self._numbers = [part for part in found if part is not None]

    def place_of(self, page: int) -> PagePlace:
        return PagePlace(self._pieces, page)

    def is_finite(self, page: int) -> bool:
        """Return whether no number of a page is NaN or infinite."""
        if self._format is None:
            return all(part.are_finite(page) for part in self._numbers)
        word_bytes, infinity = self._format
        return self._copies.largest_word(self.place_of(page), word_bytes) < infinity

    def begin_copy_out(self, pages: Sequence[int], buffers: Sequence[Bytes]) -> PageCopy:
        word_bytes, infinity = self._format or (0, 0)
        gathered = [
            self._copies.gather(self.place_of(page), buffer, word_bytes)
            for page, buffer in zip(pages, buffers, strict=True)
        ]
        finite = [
            each.largest_word < infinity if word_bytes else self.is_finite(page)
            for page, each in zip(pages, gathered, strict=True)
        ]
        return _EndedCopy(finite, [each.checksum for each in gathered])

    def begin_copy_in(self, pages: Sequence[int], sources: Sequence[Bytes | None]) -> PageCopy:
        for page, source in zip(pages, sources, strict=True):
            if source is not None:
                self._copies.scatter(source, self.place_of(page))
        return _EndedCopy([True] * len(pages))  # they were when they were copied out


class StreamEvent(Protocol):
    """The end of work on a CopyStream."""

    def synchronize(self) -> None:
        """Let the host wait."""

    def hold_steps(self) -> None:
        """Let the device begin what is launched from now on, by this thread, after the work."""


class CopyStream(Protocol):
    """Where a device copies pages, one batch after the other, beside the steps."""

    def launch(self, work: Callable[[], None]) -> StreamEvent:
        """Launch the operations of `work`, and return their end."""

    def pin(self, memory: Bytes) -> None:
        """Let the device copy to and from memory that this process has mapped.

        Raises:
            RuntimeError: the memory cannot be pinned.
        """


class HostStream:
    """In place of a stream on a CPU: operations have ended when they are launched."""

    def launch(self, work: Callable[[], None]) -> "HostStream":
        """Run `work`."""
        work()
        return self

    def pin(self, memory: Bytes) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Return at once."""

    def hold_steps(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """The end of work on a CUDA stream."""

    event: torch.cuda.Event
    device: torch.device

    def synchronize(self) -> None:
        """Let the host wait."""
        self.event.synchronize()

    def hold_steps(self) -> None:
        """Let the current stream of the device, that of the steps, wait."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


REGISTER_PORTABLE = 1  # CUDA's cudaHostRegisterPortable


class CudaStream:
    """A CUDA stream beside that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def launch(self, work: Callable[[], None]) -> CudaEvent:
        """Launch `work` on the stream."""
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return CudaEvent(event, self._device)

    def pin(self, memory: Bytes) -> None:
        """Pin memory for all devices, until this process ends."""
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, REGISTER_PORTABLE)
        if int(error):
            raise RuntimeError(
                f"CUDA cannot pin {memory.nbytes} bytes of shared memory: {error}; raise the limit"
                " of locked memory (ulimit -l)"
            )


# Large enough that the launch of a batch takes a fraction of its copy, and that loads of other
# pages need not wait long for it.
BATCH_BYTES = 32 * 2**20
SLAB_BYTES = 2**28  # torch makes a power of two of each piece of pinned memory


@dataclass(frozen=True, slots=True)
class _DeviceCopy(PageCopy):
    end: StreamEvent
    finite: Tensor  # [pages], in pinned memory

    def wait(self) -> list[bool]:
        self.end.synchronize()
        finite: list[bool] = self.finite.tolist()
        return finite

    def hold_steps(self) -> None:
        self.end.hold_steps()


class DevicePool(PoolPages):
    """A pool on a GPU, or in tests on a CPU.

    A copy needs no work of the steps to be waited for: pages are copied out when the step that has
    computed them has ended, and in where no step in flight uses them.
    """

    def __init__(self, pools: Sequence[Tensor], stream: CopyStream) -> None:
        """Allocate the staging tensor, and copy a page once, for which kernels are loaded.

        Args:
            pools: what `Engine.kv_pools` returns.
            stream: copies.
        """
        super().__init__()
        (self._dtype,) = {pool.dtype for pool in pools}
        self._device = pools[0].device
        self._stream = stream
        piece_bytes = [pool[0, 0].nbytes for pool in pools]
        self.page_bytes = sum(len(pool) * size for pool, size in zip(pools, piece_bytes))  # noqa: B905
        self.max_batch = max(1, BATCH_BYTES // self.page_bytes)
        word = _widest_word(piece_bytes)
        # Each [pages, pieces, words], a view.
        self._pools = [pool.flatten(2).view(word).transpose(0, 1) for pool in pools]
        self._staging = torch.empty(
            self.max_batch, self.page_bytes, dtype=torch.uint8, device=self._device
        )
        self._rows = self._staging.unbind()
        self._columns: list[Tensor] = []  # of the pools in the staging tensor, [batch, pieces, …]
        begin = 0
        for pool in self._pools:
            end = begin + pool[0].nbytes
            columns = self._staging[:, begin:end].view(word)
            self._columns.append(columns.unflatten(1, pool.shape[1:]))
            begin = end
        buffer = self.take_buffer()
        self.begin_copy_out([0], [buffer]).wait()
        self.give_back([buffer])

    def reserve(self, count: int) -> None:
        """Pin memory for so many pages: while steps run, that would let the GPU wait."""
        if self._memory is not None:  # it has as many
            self._stream.pin(self._memory.back_all())
            return
        num_per_slab = max(1, SLAB_BYTES // self.page_bytes)
        while (num_missing := count - len(self._free)) > 0:
            self.give_back(self._pinned(min(num_missing, num_per_slab)))

    def _allocate(self) -> Bytes:
        return self._pinned(1)[0]

    def _pinned(self, count: int) -> list[Bytes]:
        is_pinned = self._device.type == "cuda"
        slab = torch.empty(count, self.page_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return list(slab.numpy())

    def place_of(self, page: int) -> None:  # noqa: ARG002
        return None

    @torch.inference_mode()
    def begin_copy_out(self, pages: Sequence[int], buffers: Sequence[Bytes]) -> PageCopy:
        finite = self._host_flags(len(pages))

        def gather() -> None:
            numbers = self._send(pages)
            for pool, columns in zip(self._pools, self._columns):  # noqa: B905
                torch.index_select(pool, 0, numbers, out=columns[: len(pages)])
            finite.copy_(self._are_staged_finite(len(pages)), non_blocking=True)
            for row, buffer in zip(self._rows, buffers):  # noqa: B905
                torch.from_numpy(buffer).copy_(row, non_blocking=True)

        return _DeviceCopy(self._stream.launch(gather), finite)

    @torch.inference_mode()
    def begin_copy_in(self, pages: Sequence[int], sources: Sequence[Bytes | None]) -> PageCopy:
        finite = self._host_flags(len(pages))

        def scatter() -> None:
            numbers = self._send(pages)
            for row, source in zip(self._rows, sources):  # noqa: B905
                assert source is not None, "the host cannot write to the pages of a device"
                row.copy_(torch.from_numpy(source), non_blocking=True)
            for pool, columns in zip(self._pools, self._columns):  # noqa: B905
                pool.index_copy_(0, numbers, columns[: len(pages)])
            finite.copy_(self._are_staged_finite(len(pages)), non_blocking=True)

        return _DeviceCopy(self._stream.launch(scatter), finite)

    def _send(self, pages: Sequence[int]) -> Tensor:
        """Send `[pages]` to the device. One size of pinned memory serves all batches."""
        numbers = np.zeros(self.max_batch, dtype=np.int64)
        numbers[: len(pages)] = pages
        return send(numbers, self._device)[: len(pages)]

    def _host_flags(self, count: int) -> Tensor:
        is_pinned = self._device.type == "cuda"
        return torch.empty(self.max_batch, dtype=torch.bool, pin_memory=is_pinned)[:count]

    def _are_staged_finite(self, count: int) -> Tensor:
        return are_finite(self._staging[:count].view(self._dtype))


def _widest_word(sizes: Sequence[int]) -> torch.dtype:
    """Return the widest integer type that pieces of these sizes, in bytes, consist of."""
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if all(size % word.itemsize == 0 for size in sizes))
