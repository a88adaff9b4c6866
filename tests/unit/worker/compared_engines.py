"""Engines of the CPU whose every step is compared with the same step in plain torch."""

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.unit.worker_driver import CPU, Driver, load_on_cpu, prompts_of
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.weights import quantize
from worker_proc.engines.torch_engine import TorchAttention, TorchEngine
from worker_proc.models.attention import Ints
from worker_proc.step.engine import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.outputs import SampledTokens
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

CONTEXT = 128
NUM_SLOTS = 24
# Fractions of the norm. float32 differs in the order of additions, bfloat16 rounds between layers.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
QUANTIZED_TOLERANCE = 7e-2  # inputs are rounded to 8 bits, too


class Compared(Engine):
    """Computes everything twice and fails if the results differ."""

    def __init__(self, native: NativeEngine, reference: Engine, within: float) -> None:
        self.name = "compared"
        self.native, self.reference, self.within = native, reference, within

    def forward(self, inputs: StepInputs) -> Tensor:
        hidden = self.native.forward(inputs)
        self._check(hidden, self.reference.forward(inputs))
        return hidden

    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        logits = self.native.logits(hidden, adapters)
        reference = self.reference.logits(hidden, adapters)
        self._check(logits, reference)
        return logits

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        """In one go; then the rows that sample; then all of them, whose logits are sampled."""
        token_ids = np.array(self.native.forward_and_sample(inputs).token_ids)
        sampled = self.native.forward_sampled(inputs).clone()
        hidden = inputs.of_samples(self.forward(inputs))
        if len(sampled):
            self._check(sampled, hidden)
        expected = self.sample_rows(inputs, sampled)
        assert token_ids.tolist() == expected.token_ids.tolist()
        return expected

    def _check(self, ours: Tensor, reference: Tensor) -> None:
        difference = (ours - reference).norm().item() / reference.norm().item()
        assert difference <= self.within


def native(
    directory: Path,
    dtype: torch.dtype,
    page_size: int,
    threads: int = 1,
    bits: int | None = None,
    int8: bool = False,
) -> NativeEngine:
    pages, model = NUM_SLOTS * CONTEXT // page_size, load_on_cpu(directory, dtype)
    return NativeEngine(model, pages, page_size, dtype, threads, bits, int8)


@torch.inference_mode()
def reference(directory: Path, dtype: torch.dtype, page_size: int) -> TorchEngine:
    """Return plain torch in float32, with weights rounded to dtype."""
    model = load_on_cpu(directory, dtype).float()
    pages = NUM_SLOTS * CONTEXT // page_size
    attention = TorchAttention(model.attention_shape, pages, page_size, torch.float32, CPU)
    return TorchEngine(model, attention)


def drive(engine: Engine, dtype: torch.dtype, page_size: int, seed: int) -> list[list[int]]:
    """Run random prompts in random chunks beside decoding rows. Return the generated tokens."""
    pages = NUM_SLOTS * CONTEXT // page_size
    table = SlotTable(NUM_SLOTS, CONTEXT, pages, page_size, CPU)
    driver = Driver(Runner(engine, table, dtype), seed)
    source = random.Random(seed)
    lengths = [source.randint(1, CONTEXT - 12) for _ in range(source.choice([1, 5, NUM_SLOTS]))]
    requests = [driver.add(prompt) for prompt in prompts_of(lengths, seed)]
    driver.generate(requests, 6, chunk=source.choice([4, 9, 64, CONTEXT]))
    return [request.output for request in requests]


@torch.inference_mode()
def round_weights(engine: TorchEngine, bits: int) -> None:
    """Replace every matrix of a reference by the values of its quantized weights."""
    for name, weight in engine.model.named_parameters():
        if weight.dim() == 2 and "position" not in name:
            weight.data.copy_(quantize(weight.float(), bits).dense()[:, : weight.shape[1]])


def round_all_but_routers(engine: TorchEngine, bits: int) -> None:
    """Replace the matrices as `round_weights`, but those that choose experts."""
    weights = dict(engine.model.named_parameters())
    routers = {name: weight.clone() for name, weight in weights.items() if ".router." in name}
    round_weights(engine, bits)
    for name, weight in routers.items():
        weights[name].data.copy_(weight)
