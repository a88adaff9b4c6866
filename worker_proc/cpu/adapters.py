"""Adapters in the panels that the kernels multiply, see csrc/adapters.h."""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.adapters.change import Adapter, LinearChange, Part
from worker_proc.cpu.memory import allocate_apart
from worker_proc.cpu.program import LANES, AdapterPlace, UpRun
from worker_proc.cpu.weights import PANEL_ALIGNMENT_BYTES, UNIT_BYTES, panels_of, round_up


class ChangeableMatrix(NamedTuple):
    """A matrix that adapters can change.

    Attributes:
        inputs, outputs: its size.
        gated: panels of gate and up alternate.
    """

    inputs: int
    outputs: int
    gated: bool

    @property
    def panel_count(self) -> int:
        """Panels of the packed matrix."""
        halves = 2 if self.gated else 1
        return halves * -(-self.outputs // halves // LANES)

    def columns(self) -> Tensor:
        """Return the column of each output `[outputs]` among those of the panels."""
        outputs = torch.arange(self.outputs)
        if not self.gated:
            return outputs
        half = self.outputs // 2
        number = outputs % half
        return number // LANES * (2 * LANES) + outputs // half * LANES + number % LANES


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedAdapter(Adapter):
    """An adapter in panels. `changes` and `embedding` are empty: the panels have their numbers.

    Attributes:
        places: what is changed of each matrix, by its number.
        runs: what `places` point to.
        memory: likewise.
        width: elements of the widest t of a row.
    """

    places: "ctypes.Array[AdapterPlace]"
    runs: "ctypes.Array[UpRun]"
    memory: Tensor
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels."""
        return len(self.memory)


def pack_adapter(
    adapter: Adapter,
    matrices: Mapping[int, ChangeableMatrix],
    embedding: int,
    num_places: int,
    dtype: torch.dtype,
) -> PackedAdapter:
    """Pack an adapter in any thread.

    Args:
        adapter: the adapter.
        matrices: those that adapters can change, by their numbers.
        embedding: the number of the table of embeddings.
        num_places: matrices of the model.
        dtype: of the panels.
    """
    packer = _Packer(num_places, dtype)
    for number, change in adapter.changes.items():
        packer.add(number, matrices[number], change)
    if adapter.embedding is not None:
        packer.add_table(embedding, adapter.embedding)
    return packer.finish()


class _Run(NamedTuple):
    """Fields of an UpRun; `offset` of its words in the tensor that it shares with others."""

    number: int
    fields: dict[str, int]
    offset: int
    panels: Tensor


class _Packer:
    """Collects tensors, which are then copied to one piece of memory."""

    def __init__(self, num_places: int, dtype: torch.dtype) -> None:
        self._places = (AdapterPlace * num_places)()
        self._dtype = dtype
        self._per_unit = UNIT_BYTES // dtype.itemsize
        self._tensors: list[tuple[int, str, Tensor]] = []
        self._runs: list[_Run] = []
        self._width = 0

    def add(self, number: int, matrix: ChangeableMatrix, change: LinearChange) -> None:
        """Add the change of a matrix."""
        place = self._places[number]
        place.changes = True
        firsts = self._add_down(number, matrix, change)
        if change.parts:
            self._add_up(number, matrix, change.parts, firsts)
        for field, values, other in (("gain", change.gain, 1.0), ("shift", change.shift, 0.0)):
            if values is not None:
                padded = torch.full((matrix.panel_count * LANES,), other)
                padded[matrix.columns()] = values
                self._tensors.append((number, field, padded))

    def add_table(self, number: int, differences: Tensor) -> None:
        """Add what is added to the table of embeddings."""
        self._tensors.append((number, "table", differences.to(self._dtype).contiguous()))

    def finish(self) -> PackedAdapter:
        """Copy all tensors, and return the adapter."""
        pieces: dict[int, Tensor] = {}
        for tensor in (*(tensor for *_, tensor in self._tensors), *(r.panels for r in self._runs)):
            pieces.setdefault(id(tensor), tensor)
        sizes = [round_up(piece.nbytes, PANEL_ALIGNMENT_BYTES) for piece in pieces.values()]
        memory = allocate_apart(sum(sizes))
        addresses: dict[int, int] = {}
        for (key, piece), place in zip(pieces.items(), memory.split(sizes), strict=True):
            addresses[key] = place.data_ptr()
            place[: piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
        for number, field, tensor in self._tensors:
            setattr(self._places[number], field, addresses[id(tensor)])
        runs = (UpRun * len(self._runs))()
        for run, made in zip(runs, self._runs, strict=True):
            for field, value in made.fields.items():
                setattr(run, field, value)
            run.words = addresses[id(made.panels)] + made.offset
            place = self._places[made.number]
            place.runs = place.runs or ctypes.addressof(run)
            place.run_count += 1
        return PackedAdapter({}, places=self._places, runs=runs, memory=memory, width=self._width)

    def _add_down(
        self, number: int, matrix: ChangeableMatrix, change: LinearChange
    ) -> dict[tuple[int, int], int]:
        """Add D, and return the first element of t of each range of its rows that a part reads."""
        ranges = dict.fromkeys((part.ranks.start, part.ranks.stop) for part in change.parts)
        if change.down is None:
            self._width = max(self._width, round_up(matrix.inputs, LANES))
            return dict.fromkeys(ranges, 0)
        firsts, rows, count = {}, [], 0
        for begin, end in ranges:
            firsts[begin, end] = count
            size = round_up(end - begin, self._per_unit)
            rows.append(F.pad(change.down[begin:end], (0, 0, 0, size - (end - begin))))
            count += size
        panels = panels_of(torch.cat(rows).to(self._dtype))
        self._tensors.append((number, "down", panels))
        self._places[number].down_panels = len(panels)
        self._width = max(self._width, len(panels) * LANES)
        return firsts

    def _add_up(
        self,
        number: int,
        matrix: ChangeableMatrix,
        parts: tuple[Part, ...],
        firsts: Mapping[tuple[int, int], int],
    ) -> None:
        """Add U: for neighbouring panels that read the same elements of t, a run."""
        columns, period = matrix.columns(), 2 if matrix.gated else 1
        placed = [
            _Placed(columns[part.rows], part.up, firsts[part.ranks.start, part.ranks.stop])
            for part in parts
        ]
        spans = self._spans(placed, matrix.panel_count)
        turns = [tuple(spans[i : i + period]) for i in range(0, len(spans), period)]
        begin = 0
        for read, alike in groupby(turns):
            end = begin + period * len(list(alike))
            depth = sum(span.depth for span in read)
            if depth:
                panels = torch.cat(
                    [
                        self._panels(placed, range(begin + i, end, period), span)
                        for i, span in enumerate(read)
                    ],
                    1,
                )
                self._runs += _runs_of(number, begin, end, read, depth, panels)
            begin = end

    def _spans(self, placed: "list[_Placed]", panel_count: int) -> "list[_Span]":
        """Return what each panel reads of t: all that one of its parts does."""
        firsts, ends = [sum(part.up.shape[1] + part.first for part in placed)] * panel_count, [0]
        ends *= panel_count
        for part in placed:
            end = part.first + part.up.shape[1]
            for panel in (part.columns // LANES).unique().tolist():
                firsts[panel] = min(firsts[panel], part.first // self._per_unit)
                ends[panel] = max(ends[panel], -(-end // self._per_unit))
        return [
            _Span(first, end - first) if end else _Span(0, 0)
            for first, end in zip(firsts, ends, strict=True)
        ]

    def _panels(self, placed: "list[_Placed]", panels: range, span: "_Span") -> Tensor:
        """Return panels `[panels, depth * 16]` of those with these numbers."""
        rows = torch.zeros(len(panels) * LANES, span.depth * self._per_unit, dtype=self._dtype)
        if not span.depth:
            return rows.view(torch.int32).view(len(panels), 0)
        for part in placed:
            panel, lane = part.columns // LANES, part.columns % LANES
            here = (panel >= panels.start) & (panel < panels.stop)
            here &= (panel - panels.start) % panels.step == 0
            to = (panel[here] - panels.start) // panels.step * LANES + lane[here]
            first = part.first - span.first * self._per_unit
            if len(to):
                rows[to, first : first + part.up.shape[1]] = part.up[here].to(self._dtype)
        return panels_of(rows).flatten(1)


class _Placed(NamedTuple):
    """Rows of U: their columns among those of the panels, and the first element of t they read."""

    columns: Tensor
    up: Tensor
    first: int


class _Span(NamedTuple):
    """What a panel reads of t, in units of 4 bytes of a column."""

    first: int
    depth: int


def _runs_of(
    number: int, begin: int, end: int, read: tuple[_Span, ...], depth: int, panels: Tensor
) -> Iterator[_Run]:
    before = 0
    for i, span in enumerate(read):
        if span.depth:
            fields = {
                "begin": begin + i,
                "end": end,
                "step": len(read),
                "panel_units": depth * LANES,
                "first": span.first,
                "depth": span.depth,
            }
            yield _Run(number, fields, before * LANES * UNIT_BYTES, panels)
        before += span.depth
