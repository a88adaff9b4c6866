"""Measure how fast this machine reads memory and multiplies matrices."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from bench.roofline.roofline_model import Product, Speed, StepPart
from bench.worker_steps import Case, Row, WorkerBench
from quadriga.server.config.engine_args import WorkerArgs
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.memory import allocate
from worker_proc.cpu.program import OpKind
from worker_proc.engines.factory import make_engine
from worker_proc.models import attention, base, layers
from worker_proc.models.base import StoredRows
from worker_proc.models.ops import Ops, Value
from worker_proc.step.engine import Engine

READ_BYTES = 512 * 2**20  # far more than the caches hold
NUM_PASSES = 3  # of which the fastest one counts
READ_INPUTS = 1024  # of the product of one row, which is bound by reading
PRODUCT_ROWS = 512
CPU = torch.device("cpu")


class ReadSpeed:
    """Reads a large array with all threads in two ways.

    By torch, and as the weights of the worker's own product of one row. Which one is faster depends
    on the machine.
    """

    def __init__(self, args: WorkerArgs, dtype: torch.dtype, size: int = READ_BYTES) -> None:
        # Random values: a host may merge equal pages, which are then read too fast.
        self._array = allocate(size).view(torch.float32).uniform_()
        product = Product(READ_INPUTS, size // dtype.itemsize // READ_INPUTS)
        plain = dataclasses.replace(args, quantization="none")
        self._product = _TimedProduct(product, plain, args.attention_backend, dtype, rows=1)
        self._size = product.weights * dtype.itemsize

    @torch.inference_mode()
    def measure(self) -> float:
        """Return bytes per second, by the faster way."""
        by_torch = self._array.nbytes / least_seconds(self._array.max)
        return max(by_torch, self._size / self._product.measure())


class ProductSpeed:
    """Measures a model's products by plain torch with oneDNN and by the worker's own kernels."""

    def __init__(self, products: Iterable[Product], args: WorkerArgs, dtype: torch.dtype) -> None:
        kinds = dict.fromkeys(("torch", args.attention_backend))
        self._ways = {
            product: {
                kernels: _TimedProduct(product, args, kernels, dtype, PRODUCT_ROWS)
                for kernels in kinds
            }
            for product in dict.fromkeys(products)
        }

    @torch.inference_mode()
    def measure(self) -> dict[Product, float]:
        """Return operations per second of each product, by the faster way."""
        return {
            product: product.operations(PRODUCT_ROWS)
            / min([way.measure() for way in ways.values()])
            for product, ways in self._ways.items()
        }

    def medians(self) -> dict[Product, dict[str, float]]:
        """Return the median rates of all measurements by the value of --attention-backend."""
        return {
            product: {
                kernels: product.operations(PRODUCT_ROWS) / statistics.median(way.seconds)
                for kernels, way in ways.items()
            }
            for product, ways in self._ways.items()
        }


class _TimedProduct:
    """One product of `rows` rows by one engine, with the seconds of each measurement."""

    def __init__(
        self, product: Product, args: WorkerArgs, kernels: str, dtype: torch.dtype, rows: int
    ) -> None:
        args = dataclasses.replace(args, attention_backend=kernels)
        model = OneProduct(product).to(dtype)
        for weight in model.parameters():
            weight.normal_()
        self._engine: Engine = make_engine(args, model, 1, dtype, CPU)
        native = isinstance(self._engine, NativeEngine)
        self._input = torch.randn(rows, product.inputs).to(torch.float32 if native else dtype)
        self.seconds: list[float] = []

    def measure(self) -> float:
        """Measure once, and return the seconds."""
        self.seconds.append(least_seconds(lambda: self._engine.logits(self._input)))
        return self.seconds[-1]


class OneProduct(base.Model):
    """A model whose head is a norm and the product, without layers."""

    final_norm: layers.RMSNorm

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.vocab_size = product.outputs
        self.classifier = None
        self.attention_shape = attention.AttentionShape(layers=1, heads=1, kv_heads=1, head_dim=16)
        self._tokens = layers.Embedding(1, product.inputs)
        self.final_norm = layers.RMSNorm(product.inputs, 1e-5)
        self.linear = layers.Linear(product.inputs, product.outputs)

    def forward(self, ops: Ops[Value]) -> Value:
        """Return embeddings, which nothing uses."""
        return ops.embed(self._tokens)

    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        """Return the product."""
        return ops.logits(self.linear, ops.norm(self.final_norm, hidden))

    def checkpoint_rows(self) -> dict[str, StoredRows]:
        """Return nothing: the weights are random."""
        return {}

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return nothing: the weights are random."""
        return {}


def least_seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest pass, after an unmeasured one."""
    work()
    seconds = []
    for _ in range(NUM_PASSES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


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
