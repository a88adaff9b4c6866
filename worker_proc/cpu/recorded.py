"""What the engine of the native kernels runs: a program, and the rows that it is run for."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from worker_proc.attention.base import Ints
from worker_proc.cpu.program import Buffer, Op, OpKind, Program
from worker_proc.cpu.recorder import Recorder


class StepRows(NamedTuple):
    """What the kernels are told of each row, and the token that each sampling one has chosen."""

    slots: Ints
    computed: Ints
    num_tokens: Ints
    best: Ints

    @classmethod
    def of(cls, count: int) -> "StepRows":
        return cls(*np.empty((4, count), dtype=np.int64))


@dataclass(slots=True)
class Recorded:
    """A program, the elements in a row of each buffer that it writes, and for how many tokens
    there is room in them."""

    program: Program
    widths: dict[Buffer, int]
    room: int = 0

    @classmethod
    def of(cls, recorder: Recorder, settings: dict[str, object]) -> "Recorded":
        return cls.from_ops(recorder.ops, recorder.widths, settings)

    @classmethod
    def from_ops(
        cls, ops: list[Op], widths: dict[Buffer, int], settings: dict[str, object]
    ) -> "Recorded":
        return cls(Program(op_count=len(ops), ops=(Op * len(ops))(*ops), **settings), widths)

    @property
    def ops(self) -> list[Op]:
        return self.program.ops[: self.program.op_count]

    def compute_sampled_only(self) -> None:
        """Once the last layer's keys and values are written no token needs another one, so that
        of what follows only the rows that sample are computed."""
        ops = self.ops
        writes = [i for i, op in enumerate(ops) if op.kind == OpKind.ROTATE_WRITE]
        for op in ops[writes[-1] + 1 :] if writes else ():
            op.sampled = True
