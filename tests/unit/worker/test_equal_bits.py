"""The CPU kernels give a row's logits the same bits, whatever else is in the step."""

import platform
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.formats.quantization import BLOCK_SIZES
from quadriga.server.models.resolve import resolve_model
from tests.tiny_experts import tiny_gpt_oss
from tests.tiny_models import FAMILIES, odd_llama, tiny_gpt2, tiny_llama
from tests.unit.quantized_checkpoint import FORMATS, quantize_checkpoint
from tests.unit.worker.native_matrices import NativeMatrix
from tests.unit.worker.packed_matrices import random_inputs, random_rows
from tests.unit.worker_driver import Driver, Request, prompts_of
from worker_proc.cpu import engine as cpu_engine
from worker_proc.cpu.build import ARCH_VARIABLE
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.program import ComputeType
from worker_proc.loading.loader import load_model
from worker_proc.models.attention import Ints
from worker_proc.step.engine import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.outputs import SampledTokens
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

CPU = torch.device("cpu")
CONTEXT = 704  # more than a part of a context, 512 keys
NUM_SLOTS = 64
NUM_TOKENS = 5
LONG, SHORT, SHORTEST = 600, 70, 1
Bits = dict[int, bytes]


class Recording(Engine):
    """Keeps the bits of the logits of every sampled row."""

    def __init__(self, native: NativeEngine) -> None:
        self.name = "recording"
        self.native = native
        self.bits: dict[tuple[int, int], bytes] = {}

    def forward(self, inputs: StepInputs) -> Tensor:
        return self.native.forward(inputs)

    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        return self.native.logits(hidden, adapters)

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        """In one go, then by logits, which must give the same tokens."""
        token_ids = np.array(self.native.forward_and_sample(inputs).token_ids)
        hidden = self.native.forward_sampled(inputs)
        if len(hidden):
            logits = self.native.logits(hidden)
            assert logits.argmax(-1).tolist() == token_ids.tolist()
            places = zip(inputs.sampled_slots.tolist(), inputs.sample_positions, strict=True)
            for (slot, position), row in zip(places, logits, strict=True):
                self.bits[slot, int(position)] = row.numpy().tobytes()
        return SampledTokens(token_ids)

    def of(self, request: Request) -> Bits:
        """Return the bits of a request by position."""
        return {at: bits for (slot, at), bits in self.bits.items() if slot == request.slot}


class Case(NamedTuple):
    """Numbers, weights and pages of an engine."""

    dtype: torch.dtype
    bits: int | None = None
    int8_pages: bool = False
    compute_type: ComputeType | None = None
    page_size: int = 16


CASES = {
    "float32": Case(torch.float32),
    "float32, pages of 4": Case(torch.float32, page_size=4),
    "bfloat16": Case(torch.bfloat16),
    "bfloat16 as floats": Case(torch.bfloat16, compute_type=ComputeType.BFLOAT16),
    "bfloat16, pages of 1": Case(torch.bfloat16, page_size=1),
    "bfloat16, 8-bit pages": Case(torch.bfloat16, int8_pages=True),
    "int8": Case(torch.bfloat16, 8),
    "int4": Case(torch.bfloat16, 4),
    "int4, 8-bit pages, pages of 32": Case(torch.float32, 4, True, page_size=32),
}
FIELDS: dict[str, Any] = {"max_position_embeddings": CONTEXT}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama (6 heads of 16 over 2)": lambda path: tiny_llama(path, **FIELDS),
    "llama (8 heads of 24 over 1, biased)": lambda path: odd_llama(path, **FIELDS),
    "gpt2 (4 heads of 12)": lambda path: tiny_gpt2(path, n_positions=CONTEXT),
    "mistral (window of 24)": lambda path: FAMILIES["mistral"](path, **FIELDS),
    "gemma2 (soft caps, window of 300)": lambda path: FAMILIES["gemma2"](
        path, sliding_window=300, **FIELDS
    ),
    "gpt-oss (sinks, experts)": lambda path: tiny_gpt_oss(path, **FIELDS),
}
FIRST_MODEL = next(iter(MODELS))
# Every format with one model, and every model in the two dtypes.
COMBINATIONS = [
    (model, case)
    for model in MODELS
    for case in CASES
    if model == FIRST_MODEL or case in ("float32", "bfloat16", "bfloat16 as floats")
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory_of(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("model"))
        return made[name]

    return directory_of


class Steps:
    """An engine, whose steps are recorded."""

    def __init__(
        self, directory: Path, case: Case, packed: bool = False, context: int = CONTEXT
    ) -> None:
        self._case, self._context = case, context
        self._num_pages = NUM_SLOTS * context // case.page_size
        numbers = (self._num_pages, case.page_size, case.dtype, 1, case.bits, case.int8_pages)
        files = resolve_model(ModelArgs(model=str(directory)))
        model = load_model(files, case.dtype, CPU, packed)
        self._native = NativeEngine(model, *numbers)

    def driver(self, threads: int = 1, seed: int = 0) -> tuple[Driver, Recording]:
        """Return a driver of empty slots, and what records its steps."""
        self._native._step.threads = threads
        engine = Recording(self._native)
        pages, size = self._num_pages, self._case.page_size
        table = SlotTable(NUM_SLOTS, self._context, pages, size, CPU)
        return Driver(Runner(engine, table, self._case.dtype), seed), engine

    def alone(self, prompt: list[int], chunk: int, threads: int) -> Bits:
        """Return the bits of a request that has every step for itself."""
        driver, engine = self.driver(threads)
        request = driver.add(prompt)
        driver.generate([request], NUM_TOKENS, chunk)
        return engine.of(request)


@pytest.mark.parametrize(("model", "name"), COMBINATIONS)
def test_logits_are_equal_alone_in_company_in_chunks_and_from_cached_prefixes(
    directories: Callable[[str], Path], model: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if case.compute_type is not None:
        monkeypatch.setattr(cpu_engine, "fastest_compute_type", lambda *_: case.compute_type)
    check_equal(Steps(directories(model), case))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64"])
def test_logits_are_equal_with_smaller_vectors(
    directories: Callable[[str], Path], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The levels have vectors of 256 and of 128 bits."""
    monkeypatch.setenv(ARCH_VARIABLE, level)
    for name in ("bfloat16", "int4"):
        check_equal(Steps(directories(FIRST_MODEL), CASES[name]))


def check_equal(steps: Steps) -> None:
    """Compare the bits of three requests alone, in company, in chunks, and behind cached pages."""
    prompts = prompts_of([LONG, SHORT, SHORTEST], seed=5)
    expected = [steps.alone(prompt, CONTEXT, threads=1) for prompt in prompts]
    assert [len(bits) for bits in expected] == [NUM_TOKENS] * 3
    for chunk, threads in ((CONTEXT, 3), (17, 1), (64, 1)):
        assert steps.alone(prompts[0], chunk, threads) == expected[0]
    assert steps.alone(prompts[1], chunk=1, threads=1) == expected[1]

    driver, engine = steps.driver(seed=3)
    source = random.Random(7)
    lengths = [source.choice([1, 2, 40, 130]) for _ in range(NUM_SLOTS - 4)]
    others = [driver.add(other) for other in prompts_of(lengths, seed=6)]
    driver.generate(others[:20], 2)
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate([*others, *requests], NUM_TOKENS, chunk=50)
    assert [engine.of(request) for request in requests] == expected

    # The tokens so far, computed again after a retraction or behind cached pages.
    long = requests[0]
    so_far = long.prompt + long.output[:2]
    for shared in (0, 64, 576):
        again = driver.add(so_far, like=long, shared=shared)
        driver.generate([again, *requests[1:]], len(requests[1].output) + 1, chunk=300)
        bits = {at: engine.of(again)[at] for at in (LONG + 2, LONG + 3, LONG + 4)}
        assert bits == {at: expected[0][at] for at in bits}
        driver.release(again)

    check_branches(steps, prompts[0], [(LONG, 576)] * 4, threads=2)


def check_branches(
    steps: Steps, trunk: list[int], branches: list[tuple[int, int]], threads: int
) -> None:
    """Compare requests that go on from a request's pages together with each of them alone.

    Rows that have the same first pages read them together in a decode step.

    Args:
        steps: the engine.
        trunk: tokens of the request.
        branches: how many tokens each has, and how many of these are the request's, in its pages.
        threads: of the engine while they are together.
    """
    others = prompts_of([length - shared for length, shared in branches], seed=8)
    prompts = [trunk[:shared] + other for (_, shared), other in zip(branches, others, strict=True)]
    expected = [steps.alone(prompt, 10**6, threads=1) for prompt in prompts]
    driver, engine = steps.driver(threads, seed=3)
    source = driver.add(trunk)
    driver.generate([source], 1)
    requests = [
        driver.add(prompt, like=source, shared=shared)
        for prompt, (_, shared) in zip(prompts, branches, strict=True)
    ]
    driver.generate([source, *requests], NUM_TOKENS)
    assert [engine.of(request) for request in requests] == expected


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["float32, pages of 4", "bfloat16", "bfloat16, 8-bit pages"])
def test_logits_are_equal_of_rows_that_share_parts_of_their_contexts(
    tmp_path: Path, name: str, threads: int
) -> None:
    """A tree: some rows share two parts of 512 keys, and with others the first one."""
    context = 1300
    steps = Steps(
        tiny_llama(tmp_path, max_position_embeddings=context), CASES[name], False, context
    )
    (tokens,) = prompts_of([1100], seed=1)
    branches = [(length, 1024) for length in range(1030, 1064)]
    branches += [(580, 576), (600, 576), (1020, 576), (1090, 576)]
    branches += [(513, 512), (530, 480), (1090, 0)]
    check_branches(steps, tokens, branches, threads)
    # All have two whole parts, and the same first one.
    check_branches(steps, tokens, [(1090, 1024 if i < 3 else 576) for i in range(6)], threads)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", BLOCK_SIZES)
def test_products_of_packed_blocks_do_not_depend_on_the_other_rows(kind: str, gated: bool) -> None:
    parts = [random_rows(kind, 80)] if gated else [random_rows(kind, 48), random_rows("Q8_0", 37)]
    matrix = NativeMatrix(parts, gated)
    x = random_inputs(150)
    pieces = x.split([*[1] * 12, 2, 3, 13, 120])
    expected = torch.cat([matrix.multiply(piece) for piece in pieces])
    assert torch.equal(matrix.multiply(x, threads=3), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_of_quantized_checkpoints_are_equal_alone_and_in_company(
    name: str, tmp_path: Path
) -> None:
    directory = tiny_llama(tmp_path, tie=False, intermediate_size=160, **FIELDS)
    quantize_checkpoint(directory, *FORMATS[name])
    steps = Steps(directory, Case(torch.bfloat16), packed=True)
    prompts = prompts_of([SHORT, 2, 30, SHORTEST, 9])
    expected = [steps.alone(prompt, CONTEXT, threads=1) for prompt in prompts]
    driver, engine = steps.driver()
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, NUM_TOKENS, chunk=13)
    assert [engine.of(request) for request in requests] == expected
