"""Time steps of the real worker, with the machine's own speed measured between them."""

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

# Every round runs NUM_STEPS steps of each kind, the kinds in another order each time.
NUM_ROUNDS, NUM_STEPS = 6, 4
NORMS, ROTATE, REST = "norms, embedding", "rotate, KV write", "Python and waiting"
PARTS = (*(part.value for part in StepPart), NORMS, ROTATE, REST)
# Operations that are not listed here belong to the linears.
PART_OF = {
    OpKind.EMBED: NORMS,
    OpKind.RMS_NORM: NORMS,
    OpKind.LAYER_NORM: NORMS,
    OpKind.MATMUL_ARGMAX: StepPart.HEAD.value,
    OpKind.ROTATE_WRITE: ROTATE,
    OpKind.ATTEND: StepPart.ATTENTION.value,
    OpKind.COMBINE: StepPart.ATTENTION.value,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A step of `rows` rows, each of `tokens` tokens after a context."""

    rows: int
    context: int
    tokens: int = 1

    @property
    def decodes(self) -> bool:
        """Whether each row computes one token."""
        return self.tokens == 1

    def case(self) -> Case:
        """Return the rows of the step."""
        return (Row(self.context, self.tokens),) * self.rows

    def __str__(self) -> str:
        if self.decodes:
            return f"decode, batch {self.rows}, context {self.context}"
        return f"prefill, {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Ms of a step and of its PARTS; the parts are empty if the engine does not time them."""

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
    """Measure all kinds of steps. The first round is not counted."""
    rounds: dict[Kind, list[MeasuredRound]] = {kind: [] for kind in kinds}
    order = list(kinds)
    with tqdm(total=(NUM_ROUNDS + 1) * len(order), unit="kind", disable=None) as bar:
        for number in range(NUM_ROUNDS + 1):
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
        return [_time(engine, lambda: bench.measure(kind.case())) for _ in range(NUM_STEPS)]
    with bench.decoding(kind.rows, kind.context - NUM_STEPS // 2, NUM_STEPS + 1) as decode:
        decode()
        return [_time(engine, decode) for _ in range(NUM_STEPS)]


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
