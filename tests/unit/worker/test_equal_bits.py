"""The CPU kernels give a row's logits the same bits, whatever else is in the step."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny_models import FAMILIES, tiny_gpt2, tiny_llama
from tests.unit.worker_driver import Driver, Request, load_on_cpu, prompts_of
from worker_proc.cpu import engine as cpu_engine
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.program import ComputeType
from worker_proc.runner import Runner
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.outputs import SampledTokens
from worker_proc.step.slot_table import SlotTable

CONTEXT = 704
NUM_SLOTS = 64
NUM_TOKENS = 6
Bits = dict[int, bytes]


class Recording(Engine):
    """Keeps the bits of the logits of every sampled row."""

    def __init__(self, native: NativeEngine) -> None:
        self.name = "recording"
        self.native = native
        self.bits: dict[tuple[int, int], bytes] = {}

    def forward(self, inputs: StepInputs) -> Tensor:
        return self.native.forward(inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.native.logits(hidden)

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
LONG = {"max_position_embeddings": CONTEXT}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama (6 heads of 16 over 2)": lambda path: tiny_llama(path, **LONG),
    "llama (8 heads of 24 over 1, biased)": lambda path: tiny_llama(
        path,
        tie=False,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        intermediate_size=150,
        vocab_size=517,
        **LONG,
    ),
    "gpt2 (4 heads of 12)": lambda path: tiny_gpt2(path, n_positions=CONTEXT),
    "mistral (window of 24)": lambda path: FAMILIES["mistral"](path, **LONG),
    "gemma2 (soft caps)": lambda path: FAMILIES["gemma2"](path, sliding_window=300, **LONG),
}


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    chosen = CASES[request.param]
    if chosen.compute_type is not None:
        monkeypatch.setattr(
            cpu_engine, "fastest_compute_type", lambda *_: chosen.compute_type
        )
    return chosen


def driver_of(directory: Path, case: Case, threads: int, seed: int = 0) -> tuple[Driver, Recording]:
    pages = NUM_SLOTS * CONTEXT // case.page_size
    model = load_on_cpu(directory, case.dtype)
    native = NativeEngine(
        model, pages, case.page_size, case.dtype, threads, case.bits, case.int8_pages
    )
    engine = Recording(native)
    table = SlotTable(NUM_SLOTS, CONTEXT, pages, case.page_size, torch.device("cpu"))
    return Driver(Runner(engine, table, case.dtype), seed), engine


def alone(
    directory: Path, case: Case, prompt: list[int], chunk: int, threads: int
) -> tuple[list[int], Bits]:
    driver, engine = driver_of(directory, case, threads)
    request = driver.add(prompt)
    driver.generate([request], NUM_TOKENS, chunk)
    return request.output, engine.of(request)


LENGTHS = [1, 65, 255, 290, 600]


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_alone_in_company_and_in_chunks(directory: Path, case: Case, length: int) -> None:
    prompt = prompts_of([length], seed=length)[0]
    output, expected = alone(directory, case, prompt, CONTEXT, threads=1)
    failures = []
    for chunk, threads in ((CONTEXT, 8), (1, 1), (17, 3), (64, 1)):
        other_output, bits = alone(directory, case, prompt, chunk, threads)
        if bits != expected: failures.append(("chunk", chunk, threads, [at for at in expected if bits[at] != expected[at]]))
    driver, engine = driver_of(directory, case, 2, seed=3)
    source = random.Random(length)
    lengths = [source.choice([1, 2, 40, 130]) for _ in range(NUM_SLOTS - 1)]
    others = [driver.add(other) for other in prompts_of(lengths, seed=length + 1)]
    driver.generate(others[:20], 2)
    request = driver.add(prompt)
    driver.generate([*others, request], NUM_TOKENS, chunk=50)
    bits = engine.of(request)
    if bits != expected: failures.append(("company", [at for at in expected if bits[at] != expected[at]]))
    assert not failures
