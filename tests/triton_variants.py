"""Serve on a GPU that does not exist, and print the kernels that would be compiled meanwhile.

    python -m tests.triton_variants
    python -m tests.triton_variants --models llama --deterministic

Each model is served with CUDA graphs and without, and tokens are drafted in half of the steps. The
worker runs its real steps on a CPU. Triton's launches compute nothing; each is noted with the
variant of the kernel that it would need: types, alignments and constants of the arguments. A
variant that is first met after the start would be compiled while requests wait, so there must be
none. A process of its own, as it replaces Triton's driver. Prints also the operations of torch in
one decode step with top_p, and those that ask the device for a value.
"""

import argparse
import os
import random
import sys
from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import jit
from triton.runtime.driver import driver

from quadriga.wire.packing import num_ids, pack_ids
from quadriga.wire.worker import (
    DECODE,
    MIXED,
    NO_ADAPTER,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
)
from tests.always_few_rows import AlwaysFewRows
from worker_proc.adapters.change import Adapter, AdapterLimits
from worker_proc.gpu import engine as gpu_engine
from worker_proc.gpu import pages, products
from worker_proc.gpu.engine import TritonEngine
from worker_proc.gpu.graphs import Captured, GraphOutput, batch_sizes, prompt_sizes
from worker_proc.models.decoder import build_model
from worker_proc.sampling.grammar import CompiledGrammar, Mask, SlotConstraint
from worker_proc.step.runner import Drafter, Runner
from worker_proc.step.slot_table import SlotTable, ints_of

CPU = torch.device("cpu")
MAX_ROWS, NUM_SLOTS, CONTEXT, PAGE_SIZE, NUM_PAGES = 32, 64, 16_384, 16, 20_000
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16,
        "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1000,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "n_layer": 2, "n_embd": 192, "n_head": 12, "n_inner": None,
        "n_positions": CONTEXT, "vocab_size": 1000, "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 128,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16,
        "intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 2,
        "vocab_size": 1000, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
ADAPTERS = AdapterLimits(3, 64)
QUESTIONS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")


class Launches:
    """The launches of kernels, by the variant that each would need."""

    def __init__(self) -> None:
        self.variants: Counter[tuple[str, str]] = Counter()
        self._binders: dict[Any, Any] = {}

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        """Stand in for JITFunction.run."""
        if function not in self._binders:
            self._binders[function] = function.create_binder()[-1]
        specialization = self._binders[function](*args, **constants)[1]
        self.variants[function.fn.__name__, str(specialization)] += 1


class AtenCounter(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def pretend_gpu() -> Launches:
    """Make Triton believe in a GPU, and note what is launched on it."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: CPU,
        )
    )
    launches = Launches()
    jit.JITFunction.run = lambda *args, **kwargs: launches.run(*args, **kwargs)
    for module in (pages, products):
        module.__dict__["num_multiprocessors"] = lambda device: 132
    return launches


def capture(run: Any) -> Captured:
    """Capture a graph: run once to compile, once to note, as CudaCapture does."""
    run()
    output: GraphOutput = run()
    return lambda: None, output


def build_runner(
    kind: str, with_graphs: bool, deterministic: bool, with_adapters: bool = False
) -> Runner:
    """Return a worker whose weights and tokens are of no interest."""
    model = build_model(MODELS[kind], torch.bfloat16, CPU)
    model.to_empty(device=CPU)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.zero_()
    model.finish_loading(CONTEXT)
    engine = TritonEngine(
        model, NUM_PAGES, PAGE_SIZE, torch.bfloat16, CPU, deterministic, batch_sizes(MAX_ROWS),
        capture if with_graphs else None, prompt_sizes=prompt_sizes(10**6, 10**10),
        drafts=True, adapters=ADAPTERS if with_adapters else None,
    )  # fmt: skip
    if with_adapters:
        for index in range(ADAPTERS.max_adapters):
            engine.set_adapter(index, Adapter({}))
    table = SlotTable(NUM_SLOTS, CONTEXT, NUM_PAGES, PAGE_SIZE, CPU)
    return Runner(engine, table, torch.bfloat16)


class RandomDrafts(Drafter):
    """Drafts up to seven tokens in rows that decode, in half of the steps.

    Attributes:
        num_steps: Steps with drafts.
    """

    def __init__(self, table: SlotTable, max_samples: int) -> None:
        self._table, self._max_samples, self._draw = table, max_samples, random.Random(1)
        self.num_steps = 0

    def begin(self, plan: StepPlan) -> None:
        """Do nothing."""

    def draft(self, plan: StepPlan) -> None:
        """Draft some token, which is wrong or right by chance."""
        table, draw, slots = self._table, self._draw, ints_of(plan.slots)
        left, drafts = self._max_samples - len(slots), {}
        decoding = slots[table.num_computed[slots] + 1 == table.num_known[slots]].tolist()
        for slot in decoding if draw.random() < 0.5 else []:
            count = min(draw.randrange(8), table.room_for_drafts(slot), left)
            if count > 0:
                drafts[slot] = [3] * count
                left -= count
        if drafts:
            table.draft(drafts)
            self.num_steps += 1


class AnyText(SlotConstraint):
    """Masks no token, and is masked all the same."""

    matcher = None

    def adjust(self, mask: Mask) -> None:
        """Allow every token."""
        mask[:] = 0xFF

    def advance(self, token: int) -> str:
        """Accept a token."""
        return ""

    def take_forced(self, max_tokens: int) -> list[int]:
        """Return no tokens."""
        return []

    def copy(self) -> "AnyText":
        """Return the same state."""
        return self

    def ends_with(self, token: int) -> bool:
        """Return False."""
        return False

    def begin(self, *_: Any) -> "AnyText":
        """Return the state of a slot, in place of a CompiledGrammar."""
        return self


GRAMMAR = b"any text"


class Load:
    """Requests that come and go at random, in place of a scheduler. A quarter have a grammar."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self._runner, self._draw = runner, random.Random(seed)
        self._slots, self._pages = list(range(NUM_SLOTS)), list(range(NUM_PAGES))
        self._known: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._own: dict[int, list[int]] = {}
        self._step = 0

    def step(self, arrivals: int) -> None:
        """Run a step of all rows; new prompts are computed as a whole, behind what is cached."""
        ended = [slot for slot, left in self._left.items() if left == 0]
        for slot in ended:
            self._slots.append(slot)
            self._pages += self._own.pop(slot)
            del self._left[slot], self._known[slot]
        grown: list[int] = []
        for slot, known in self._known.items():
            if known > len(self._own[slot]) * PAGE_SIZE:
                self._own[slot].append(self._pages.pop())
                grown += slot, self._own[slot][-1]
        decoding = list(self._known)
        new = [self._admit() for _ in range(arrivals)]
        rows = [*decoding, *(one.slot for one in new)]
        counts = [1] * len(decoding) + [len(one.token_ids) // 4 - one.computed for one in new]
        if rows:
            mode = MIXED if new else DECODE
            plan = StepPlan(self._step, mode, pack_ids(rows), pack_ids(counts), new,
                                pack_ids(ended), pack_ids(grown))  # fmt: skip
            for drafted in self._runner.run(plan).guessed:
                self._known[rows[drafted.row]] += num_ids(drafted.token_ids)
            self._step += 1
        for slot in rows:
            self._known[slot] += 1
            self._left[slot] -= 1

    def _admit(self) -> NewSlot:
        slot, draw = self._slots.pop(0), self._draw
        computed = draw.choice([0, 0, 0, 2000, 9000])
        length = computed + draw.choice([draw.randrange(1, 20), draw.randrange(1, 150)])
        own = [self._pages.pop() for _ in range(-(-length // PAGE_SIZE))]
        has_adapters = self._runner.engine.supports_adapters
        adapter = draw.randrange(NO_ADAPTER, ADAPTERS.max_adapters) if has_adapters else NO_ADAPTER
        self._known[slot], self._left[slot], self._own[slot] = length, draw.randrange(1, 60), own
        kind = draw.choice([(0.0, -1, 1.0), (0.8, -1, 1.0), (0.8, 40, 0.9)])
        rules = draw.choice([None, None, None, SlotSamplingParams(length, grammar=GRAMMAR)])
        return NewSlot(
            slot, pack_ids([3] * length), computed, pack_ids(own), *kind, draw.randrange(99), rules,
            adapter=adapter,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        return len(self._known)

    def serve(self, num_steps: int) -> None:
        """Run steps in which prompts arrive, one after the other or several at once."""
        for _ in range(num_steps):
            has_room = self.num_rows < MAX_ROWS - 4
            self.step(self._draw.choice([0, 0, 0, 1, 1, 2, 3]) if has_room else 0)


def decode_operations(runner: Runner) -> Counter[str]:
    """Count torch's operations in a decode step of four rows with top_p."""
    ids, pages_of = pack_ids([5] * 8), [pack_ids([page]) for page in range(4)]
    new = [NewSlot(slot, ids, 7, pages_of[slot], 0.8, -1, 0.9, slot) for slot in range(4)]
    rows, ones = pack_ids(range(4)), pack_ids([1] * 4)
    runner.run(StepPlan(0, DECODE, rows, ones, new, b""))
    with AtenCounter() as counted:
        runner.run(StepPlan(1, DECODE, rows, ones, [], b""))
    runner.run(StepPlan(2, DECODE, b"", b"", [], rows))
    return counted.names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--adapters", action="store_true", help="most requests have an adapter")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    launches, num_met = pretend_gpu(), 0
    if not arguments.deterministic:
        gpu_engine.__dict__["Products"] = AlwaysFewRows
    for model, with_graphs in product(arguments.models, (True, False)):
        launches.variants.clear()
        runner = build_runner(model, with_graphs, arguments.deterministic, arguments.adapters)
        num_met += serve(f"{model} {'with' if with_graphs else 'without'} graphs:", runner,
                         launches, arguments.steps)  # fmt: skip
    return 1 if num_met else 0


def serve(label: str, runner: Runner, launches: Launches, num_steps: int) -> int:
    """Start and serve; print what was launched, and return the variants met while serving."""
    runner.warm_up()
    at_start = set(launches.variants)
    print(label, len(at_start), "variants of kernels at the start")
    operations = decode_operations(runner)
    questions = sum(operations[name] for name in QUESTIONS)
    print(label, f"a decode step with top_p: {sum(operations.values())} operations,"
          f" {questions} questions")  # fmt: skip
    drafter = RandomDrafts(runner.table, runner.engine.max_draft_samples)
    runner.drafter = drafter
    runner.table.sampling.compiled = {GRAMMAR: cast(CompiledGrammar, AnyText())}
    Load(runner).serve(num_steps)
    print(label, drafter.num_steps, "steps with drafts")
    met = [variant[0] for variant in launches.variants if variant not in at_start]
    print(label, len(met), "variants first met while serving", dict(Counter(met)))
    return len(met)


if __name__ == "__main__":
    sys.exit(main())
