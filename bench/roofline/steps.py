"""Steps of the real worker, with the machine's own speed measured between them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from bench.roofline.machine_speed import ProductSpeed, ReadSpeed
from bench.roofline.roofline_model import Speed, StepPart
from bench.worker_steps import Case, Row, WorkerBench
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.program import OpKind
from worker_proc.step.engine_base import Engine

ROUNDS, STEPS = 6, 4
"""Every round runs so many steps of each kind, the kinds in another order each time."""
NORMS, ROTATE, REST = "norms, embedding", "rotate, KV write", "Python and waiting"
PARTS = (*(part.value for part in StepPart), NORMS, ROTATE, REST)
PART_OF = {
    OpKind.EMBED: NORMS,
    OpKind.RMS_NORM: NORMS,
    OpKind.LAYER_NORM: NORMS,
    OpKind.MATMUL_BEST: StepPart.HEAD.value,
    OpKind.ROTATE_WRITE: ROTATE,
    OpKind.ATTEND: StepPart.ATTENTION.value,
    OpKind.COMBINE: StepPart.ATTENTION.value,
}
"""Whatever is not here belongs to the linears."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A step of `rows` rows, each of so many tokens on top of a context."""

    rows: int
    context: int
    tokens: int = 1

    @property
    def decodes(self) -> bool:
        return self.tokens == 1

    def case(self) -> Case:
        return (Row(self.context, self.tokens),) * self.rows

    def __str__(self) -> str:
        if self.decodes:
            return f"decode, batch {self.rows}, context {self.context}"
        return f"prefill, {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class StepTime:
    """ms of a step, and of its PARTS; parts are empty where the engine does not tell."""

    ms: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class MeasuredRound:
    """Steps of one kind, and the machine's speed while they ran."""

    steps: list[StepTime]
    speed: Speed


def measure(
    bench: WorkerBench, kinds: Sequence[Kind], reads: ReadSpeed, products: ProductSpeed
) -> dict[Kind, list[MeasuredRound]]:
    """The first round is not counted."""
    rounds: dict[Kind, list[MeasuredRound]] = {kind: [] for kind in kinds}
    order = list(kinds)
    with tqdm(total=(ROUNDS + 1) * len(order), unit="kind", disable=None) as bar:
        for number in range(ROUNDS + 1):
            random.Random(number).shuffle(order)
            rates = products.measure()
            for kind in order:
                before, steps, after = reads.measure(), _steps(bench, kind), reads.measure()
                if number:
                    rounds[kind].append(MeasuredRound(steps, Speed((before + after) / 2, rates)))
                bar.update()
    return rounds


def _steps(bench: WorkerBench, kind: Kind) -> list[StepTime]:
    engine = bench.runner.engine
    if not kind.decodes:
        return [_time(engine, lambda: bench.measure(kind.case())) for _ in range(STEPS)]
    with bench.decoding(kind.rows, kind.context - STEPS // 2, STEPS + 1) as decode:
        decode()
        return [_time(engine, decode) for _ in range(STEPS)]


def _time(engine: Engine, step: Callable[[], float]) -> StepTime:
    if not isinstance(engine, NativeEngine):
        return StepTime(step(), {})
    with engine.timed() as operations:
        ms = step()
    parts = dict.fromkeys(PARTS, 0.0)
    for kind, seconds in operations:
        parts[PART_OF.get(kind, StepPart.LINEARS.value)] += 1000 * seconds
    parts[REST] = ms - sum(parts.values())
    return StepTime(ms, parts)
