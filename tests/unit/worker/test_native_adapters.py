"""The CPU kernels compute rows of different adapters in one step, as plain torch does."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.worker import NO_ADAPTER
from tests.tiny_experts import EXPERTS, tiny_gpt_oss, tiny_mixtral, tiny_qwen3_moe
from tests.tiny_models import FAMILIES, odd_llama, tiny_gpt2, tiny_llama
from tests.unit.drafting import generate, no_rules, rows_of
from tests.unit.gguf_checkpoint import gguf_of
from tests.unit.quantized_checkpoint import FORMATS, quantize_checkpoint
from tests.unit.worker.compared_engines import (
    CONTEXT,
    NUM_SLOTS,
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    Compared,
    native,
    reference,
    round_all_but_routers,
)
from tests.unit.worker.random_adapters import random_adapter
from tests.unit.worker_driver import CPU, Driver, Request, load_on_cpu, prompts_of, runner_of
from worker_proc.adapters.change import Adapter
from worker_proc.cpu import engine as cpu_engine
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.program import ComputeType, Format, Matrix
from worker_proc.engines.torch_engine import TorchAttention, TorchEngine
from worker_proc.loading.loader import load_model
from worker_proc.models.attention import Ints
from worker_proc.models.decoder import Decoder
from worker_proc.speculation.self_draft import SelfDrafter
from worker_proc.step.engine import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.outputs import SampledTokens
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama, tied head": tiny_llama,
    "llama (8 heads of 24 over 1, biased, untied)": odd_llama,
    "gpt2": tiny_gpt2,
    "gemma2 (scaled embeddings, soft caps)": FAMILIES["gemma2"],
    "qwen3 (heads of 24, normalized)": FAMILIES["qwen3"],
    # Of fewer experts, rounding would change which ones are chosen.
    "mixtral, all experts chosen": lambda path: tiny_mixtral(path, num_experts_per_tok=5),
    "gpt_oss, all experts chosen": lambda path: tiny_gpt_oss(path, num_experts_per_tok=6),
}
RANKS = (4, 8, 16, 5, 64, 1, 32, 256)


def adapters_of(directory: Path) -> list[Adapter]:
    """Return eight adapters, of some projections and of all: gains, heads, embeddings, experts."""
    model = load_on_cpu(directory)
    assert isinstance(model, Decoder)
    kinds: list[dict[str, Any]] = [
        {"experts": True},
        {"wanted": lambda name: "q_proj" in name or "v_proj" in name or "attn" in name},
        {"shift": True},
        {"gain": True},
        {"gain": True, "shift": True, "experts": True},
        {"head": True, "experts": True},
        {"embedding": True},
        {"head": True, "embedding": True, "gain": True, "experts": True},
    ]
    return [
        random_adapter(model, rank, seed, **kind)
        for seed, (rank, kind) in enumerate(zip(RANKS, kinds, strict=True))
    ]


def mixed_driver(engine: Engine, dtype: torch.dtype, page_size: int = 16) -> Driver:
    table = SlotTable(NUM_SLOTS, CONTEXT, NUM_SLOTS * CONTEXT // page_size, page_size, CPU)
    return Driver(Runner(engine, table, dtype), seed=1)


def add(driver: Driver, prompt: Sequence[int], adapter: int) -> Request:
    request = driver.add(prompt)
    driver.set_adapter(request, adapter)
    return request


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_step_has_the_numbers_of_plain_torch(
    name: str, dtype: torch.dtype, bits: int | None, tmp_path: Path
) -> None:
    directory = MODELS[name](tmp_path)
    ours, theirs = native(directory, dtype, 16, bits=bits), reference(directory, dtype, 16)
    if bits is not None:
        round_all_but_routers(theirs, bits)
    within = TOLERANCE[dtype] if bits is None else QUANTIZED_TOLERANCE
    check_adapters(ours, theirs, adapters_of(directory), within)


@pytest.mark.parametrize("family", EXPERTS)
def test_chosen_experts_of_every_family_have_the_numbers_of_plain_torch(
    family: str, tmp_path: Path
) -> None:
    directory, dtype = EXPERTS[family](tmp_path), torch.float32
    ours, theirs = native(directory, dtype, 16, threads=2), reference(directory, dtype, 16)
    check_adapters(ours, theirs, adapters_of(directory), TOLERANCE[dtype])


@torch.inference_mode()
def check_adapters(
    ours: NativeEngine, theirs: TorchEngine, adapters: Sequence[Adapter], within: float
) -> None:
    """Compare every step of rows of eight adapters, and of rows without one."""
    for index, adapter in enumerate(adapters):
        ours.set_adapter(index, adapter)
        theirs.set_adapter(index, adapter)
    driver = mixed_driver(Compared(ours, theirs, within), torch.float32)
    prompts = prompts_of([5, 1, 70, 12, 3, 33, 8, 2, 2, 9, 20, 4])
    indexes = [0, NO_ADAPTER, 1, 2, 3, 4, 5, 6, 7, 0, 3, 0]
    requests = [add(driver, p, a) for p, a in zip(prompts, indexes, strict=True)]
    driver.generate(requests, 4, chunk=25)


@pytest.mark.parametrize("name", ["gptq 4 bits, act order", "fp8, blocks", "nf4", "int-quantized"])
def test_adapters_of_quantized_checkpoints_have_nearly_the_numbers_of_plain_torch(
    name: str, tmp_path: Path
) -> None:
    """The inputs of D are those before they are reordered or rounded for the base's product."""
    directory = tiny_llama(tmp_path, tie=False, intermediate_size=160)
    adapters = adapters_of(directory)
    quantize_checkpoint(directory, *FORMATS[name])
    files = resolve_model(ModelArgs(model=str(directory)))
    packed = load_model(files, torch.float32, CPU, True)
    pages = NUM_SLOTS * CONTEXT // 16
    ours = NativeEngine(packed, pages, 16, torch.float32, 1, None, False)
    check_adapters(ours, reference(directory, torch.float32, 16), adapters, QUANTIZED_TOLERANCE)


def test_adapters_of_packed_ggufs_have_nearly_the_numbers_of_plain_torch(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, tie=False, intermediate_size=160)
    adapters = adapters_of(directory)
    files = gguf_of(directory, lambda name: Kind.Q8_0 if "attn_v" in name else Kind.Q4_0)
    pages = NUM_SLOTS * CONTEXT // 16
    ours = NativeEngine(
        load_model(files, torch.float32, CPU, True), pages, 16, torch.float32, 1, None, False
    )
    model = load_model(files, torch.float32, CPU)
    attention = TorchAttention(model.attention_shape, pages, 16, torch.float32, CPU)
    check_adapters(ours, TorchEngine(model, attention), adapters, QUANTIZED_TOLERANCE)


def test_adapters_of_experts_in_gptq_have_nearly_the_numbers_of_plain_torch(
    tmp_path: Path,
) -> None:
    sizes = {"num_experts_per_tok": 5, "intermediate_size": 64, "num_hidden_layers": 2}
    directory = tiny_mixtral(tmp_path, **sizes)
    adapters = adapters_of(directory)
    quantize_checkpoint(directory, *FORMATS["gptq 4 bits"])
    files = resolve_model(ModelArgs(model=str(directory)))
    packed = load_model(files, torch.float32, CPU, True)
    ours = NativeEngine(packed, NUM_SLOTS * CONTEXT // 16, 16, torch.float32, 1, None, False)
    of_experts = [op.experts for op in ours._whole.ops if op.experts]
    assert of_experts
    for address in of_experts:
        assert Matrix.from_address(address).format == Format.CODED_INT4
    check_adapters(ours, reference(directory, torch.float32, 16), adapters, QUANTIZED_TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_model_itself_change_no_answer_of_an_adapter(
    llama_dir: Path, temperature: float
) -> None:
    new = [
        msgspec.structs.replace(one, adapter=adapter)
        for one, adapter in zip(
            rows_of(prompts_of([5, 9, 1]), no_rules, temperature), [1, NO_ADAPTER, 2], strict=True
        )
    ]
    adapters = adapters_of(llama_dir)[:3]
    answers = []
    for flags in ({}, {"speculative_method": "self"}):
        runner = runner_of(llama_dir, **flags)
        for index, adapter in enumerate(adapters):
            runner.engine.set_adapter(index, adapter)
        if runner.engine.draft is not None:
            runner.drafter = SelfDrafter(runner.table, runner.engine.draft)
        answers.append(generate(runner, new, 4 if flags else 0))
    (expected, num_steps), (got, num_drafting_steps) = answers
    assert got == expected
    assert num_drafting_steps < num_steps


class Recording(Engine):
    """Keeps the bits of the logits of every sampled row, which are computed in all ways."""

    def __init__(self, engine: NativeEngine) -> None:
        self.name = "recording"
        self.native = engine
        self.bits: dict[tuple[int, int], bytes] = {}

    def forward(self, inputs: StepInputs) -> Tensor:
        return self.native.forward(inputs)

    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        return self.native.logits(hidden, adapters)

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        token_ids = np.array(self.native.forward_and_sample(inputs).token_ids)
        if len(token_ids):
            hidden = self.native.forward_sampled(inputs)
            adapters = inputs.table.adapters_of(inputs.sampled_slots)
            logits = self.native.logits(hidden, adapters)
            assert logits.argmax(-1).tolist() == token_ids.tolist()
            places = zip(inputs.sampled_slots.tolist(), inputs.sample_positions, strict=True)
            for (slot, position), row in zip(places, logits, strict=True):
                self.bits[slot, int(position)] = row.numpy().tobytes()
        return SampledTokens(token_ids)

    def of(self, request: Request) -> list[bytes]:
        """Return the bits of a request by position."""
        mine = sorted((at, bits) for (slot, at), bits in self.bits.items() if slot == request.slot)
        return [bits for _, bits in mine]


NUM_TOKENS = 4
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "bits": 8},
    "int4": {"dtype": torch.bfloat16, "bits": 4},
}
COMPUTE_TYPES = {"bfloat16 as floats": ComputeType.BFLOAT16}


class Company:
    """Requests of several adapters and of the model without one, by one engine."""

    def __init__(self, directory: Path, dtype: torch.dtype, bits: int | None = None) -> None:
        self.dtype = dtype
        self.native = native(directory, dtype, 16, bits=bits)

    def bits_of(
        self,
        requests: Sequence[tuple[list[int], int]],
        chunk: int = CONTEXT,
        threads: int = 1,
    ) -> list[list[bytes]]:
        """Return the bits of prompts with an adapter each, computed together."""
        self.native._step.threads = threads
        engine = Recording(self.native)
        driver = mixed_driver(engine, self.dtype)
        added = [add(driver, prompt, adapter) for prompt, adapter in requests]
        driver.generate(added, NUM_TOKENS, chunk)
        return [engine.of(request) for request in added]


BIT_MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": odd_llama,
    "qwen3_moe": tiny_qwen3_moe,
    "gpt_oss": tiny_gpt_oss,
}


@pytest.mark.parametrize("model", BIT_MODELS)
@pytest.mark.parametrize("name", [*CASES, *COMPUTE_TYPES])
def test_bits_do_not_depend_on_the_other_rows_and_the_model_keeps_its_own(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in COMPUTE_TYPES:
        monkeypatch.setattr(cpu_engine, "fastest_compute_type", lambda *_: COMPUTE_TYPES[name])
    directory = BIT_MODELS[model](tmp_path)
    company = Company(directory, **CASES.get(name, CASES["bfloat16"]))
    prompts = prompts_of([7, 90, 1, 33, 12, 2, 21, 5] * 3)
    base = company.bits_of([(prompt, NO_ADAPTER) for prompt in prompts])
    for index, adapter in enumerate(adapters_of(directory)):
        company.native.set_adapter(index, adapter)
    assert company.bits_of([(prompt, NO_ADAPTER) for prompt in prompts]) == base

    adapters = [0, NO_ADAPTER, 1, 2, 3, 4, 5, 6, 7, 0, 0, NO_ADAPTER, *range(8), 0, 5, 5, 7]
    requests = list(zip(prompts, adapters, strict=True))
    alone = [company.bits_of([request])[0] for request in requests]
    for (_, adapter), bits, of_base in zip(requests, alone, base, strict=True):
        assert len(bits) == NUM_TOKENS
        assert (bits == of_base) == (adapter == NO_ADAPTER)
    assert company.bits_of(requests) == alone
    assert company.bits_of(requests, chunk=9, threads=2) == alone
    assert company.bits_of(requests[::-1], chunk=40) == alone[::-1]

    for index in range(8):
        company.native.set_adapter(index, None)
    assert company.bits_of([(prompt, NO_ADAPTER) for prompt in prompts]) == base
    with pytest.raises(ValueError, match="an adapter that is not loaded"):
        company.bits_of(requests[:1])


def test_decode_steps_in_one_go_give_the_tokens_of_each_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_llama(tmp_path)
    engine = native(directory, torch.float32, 16)
    for index, adapter in enumerate(adapters_of(directory)):
        engine.set_adapter(index, adapter)
    adapters = [NO_ADAPTER, *range(8), NO_ADAPTER, 3, 3]
    prompts = prompts_of([9] * len(adapters))
    outputs = []
    for in_one_go in (True, False):
        if not in_one_go:
            monkeypatch.setattr(engine, "decode", lambda *_: None)
        driver = mixed_driver(engine, torch.float32)
        requests = [add(driver, p, a) for p, a in zip(prompts, adapters, strict=True)]
        driver.generate(requests, 12)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    alone = mixed_driver(engine, torch.float32)
    request = add(alone, prompts[0], NO_ADAPTER)
    alone.generate([request], 12)
    assert request.output == outputs[0][0]


def test_the_memory_of_an_adapter_is_free_when_nothing_has_its_index(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    engine = native(directory, torch.bfloat16, 16)
    packed = engine.pack_adapter(adapters_of(directory)[0])
    memory = weakref.ref(packed.memory)
    engine.set_adapter(3, packed)
    del packed
    assert memory() is not None
    engine.set_adapter(3, None)
    assert memory() is None
