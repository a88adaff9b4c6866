"""The CPU kernels compute the same as plain torch, for random models, pages and rows."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import DECODE, StepPlan
from tests.tiny_models import FAMILIES, odd_llama, tiny_gpt2, tiny_llama
from tests.unit.worker.compared_engines import (
    CONTEXT,
    NUM_SLOTS,
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    Compared,
    drive,
    native,
    reference,
    round_weights,
)
from tests.unit.worker_driver import CPU, Driver, prompts_of
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.weights import (
    interleave,
    lines_of,
    quantize,
    round_up,
    to_panels,
    to_quantized_panels,
)
from worker_proc.sampling.sampler import NO_SAMPLE, SamplingRows, sample
from worker_proc.step.outputs import EngineOutput
from worker_proc.step.runner import Runner
from worker_proc.step.slot_table import SlotTable

PART_KEYS = 512  # keys of a part of a context, as in attention_work.h
# Two threads on the single CPU of a worker of a parallel run mostly wait for each other, so that
# few cases have them.
NUM_THREADS = {torch.float32: 2, torch.bfloat16: 1}


# One family for each kind of block; test_families.py has all.
BLOCK_KINDS = ["mistral", "qwen3", "gemma2", "gemma3_text", "glm4", "gpt_neox", "olmo3", "granite"]
MODELS: dict[str, Callable[[Path], Path]] = {
    **{name: FAMILIES[name] for name in BLOCK_KINDS},
    "gpt2 (4 heads of 12)": tiny_gpt2,
    "llama (6 heads of 16 over 2)": tiny_llama,
    "llama (8 heads of 24 over 1, biased, untied)": odd_llama,
    "llama (96 heads of 4 over 1)": lambda path: tiny_llama(
        path, num_attention_heads=96, num_key_value_heads=1, head_dim=4
    ),
    "llama (3 heads of 64)": lambda path: tiny_llama(
        path, num_attention_heads=3, num_key_value_heads=3, head_dim=64, vocab_size=517
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("page_size", "seed", "threads"), [(1, 1, 1), (4, 2, 1), (16, 3, 1), (32, 4, 2)]
)
def test_every_step_has_the_numbers_of_plain_torch(
    directory: Path, dtype: torch.dtype, page_size: int, seed: int, threads: int
) -> None:
    ours = native(directory, dtype, page_size, threads)
    theirs = reference(directory, dtype, page_size)
    drive(Compared(ours, theirs, TOLERANCE[dtype]), dtype, page_size, seed)


@pytest.mark.usefixtures("every_cpu")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_context_split_over_threads_gives_the_same_numbers(tmp_path: Path, family: str) -> None:
    """With 8 threads, the context of a single row is split into its three parts."""
    length, window = 2 * PART_KEYS + 200, PART_KEYS + 100
    fields = {"max_position_embeddings": length + 16}
    if family == "gemma2":
        fields["sliding_window"] = window
    directory = FAMILIES[family](tmp_path, **fields)
    ours = native(directory, torch.float32, 16, threads=8)
    theirs = reference(directory, torch.float32, 16)
    table = SlotTable(1, length + 16, length // 16 + 1, 16, CPU)
    engine = Compared(ours, theirs, TOLERANCE[torch.float32])
    driver = Driver(Runner(engine, table, torch.float32))
    request = driver.add(prompts_of([length])[0])
    driver.generate([request], 8, chunk=300)


def test_decode_steps_in_one_go_give_the_same_tokens_and_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_llama(tmp_path)
    tables: list[SlotTable] = []
    outputs: list[list[list[int]]] = []
    for in_one_go in (True, False):
        engine = native(directory, torch.float32, 4)
        taken: list[bool] = []

        def decode(
            plan: StepPlan,
            table: SlotTable,
            engine: NativeEngine = engine,
            taken: list[bool] = taken,
            may: bool = in_one_go,
        ) -> EngineOutput | None:
            tokens = NativeEngine.decode(engine, plan, table) if may else None
            taken.append(tokens is not None)
            return tokens

        monkeypatch.setattr(engine, "decode", decode)
        tables.append(SlotTable(NUM_SLOTS, CONTEXT, NUM_SLOTS * CONTEXT // 4, 4, CPU))
        driver = Driver(Runner(engine, tables[-1], torch.float32), seed=5)
        requests = [driver.add(p) for p in prompts_of([5, 90, 17, 5, 40, 1, 64])]
        driver.generate(requests, 30, chunk=50)
        driver.release(requests.pop(2))
        requests.append(driver.add([7, 8, 9]))
        driver.generate(requests, 35)
        outputs.append([request.output for request in requests])
        assert (sum(taken) > 20) == in_one_go
    assert outputs[0] == outputs[1]
    for name in ("tokens", "num_known", "num_computed", "num_pages_of"):
        ours, theirs = (getattr(table, name) for table in tables)
        assert (ours == theirs).all()


def test_a_step_that_is_no_plain_decode_step_is_declined_without_effect(tmp_path: Path) -> None:
    engine = native(tiny_llama(tmp_path), torch.float32, 4)
    table = SlotTable(NUM_SLOTS, CONTEXT, NUM_SLOTS * CONTEXT // 4, 4, CPU)
    driver = Driver(Runner(engine, table, torch.float32))
    greedy, full = driver.add([1, 2]), driver.add([1, 2, 3, 4])
    drawn, begun, gone = driver.add([1, 2], temperature=1.0), driver.add([1] * 9), driver.add([1])
    driver.step((greedy, 2), (full, 4), (drawn, 2), (begun, 5), (gone, 1))
    driver.release(gone)
    driver.step((greedy, 1))
    kept = (table.tokens, table.num_known, table.num_computed)
    before = [values.clone() if isinstance(values, Tensor) else values.copy() for values in kept]

    def decode(slots: list[int], counts: list[int]) -> EngineOutput | None:
        plan = StepPlan(9, DECODE, pack_ids(slots), pack_ids(counts), [], b"")
        return engine.decode(plan, table)

    alone = greedy.slot
    for others in (
        [full.slot],
        [drawn.slot],
        [begun.slot],
        [gone.slot],
        [alone],
        [-1],
        [NUM_SLOTS],
    ):
        assert decode([alone, *others], [1, 1]) is None
    assert decode([alone], [2]) is None
    assert decode([alone], []) is None
    assert all(
        np.array_equal(np.asarray(now), np.asarray(then))
        for now, then in zip(kept, before, strict=True)
    )
    assert decode([alone], [1]) is not None


@pytest.mark.parametrize(
    ("heads", "head_dim", "message"),
    [(192, 4, "192 query heads for each key head.* at most 128"), (2, 258, "heads of 258.* 256")],
)
def test_heads_that_the_kernels_have_no_room_for_are_refused(
    tmp_path: Path, heads: int, head_dim: int, message: str
) -> None:
    directory = tiny_llama(
        tmp_path,
        hidden_size=2 * heads,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=head_dim,
    )
    with pytest.raises(ModelError, match=message):
        native(directory, torch.float32, 16)


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_keys_and_values_in_8_bits_give_nearly_the_same_numbers(
    directory: Path, dtype: torch.dtype, page_size: int
) -> None:
    ours = native(directory, dtype, page_size, NUM_THREADS[dtype], int8=True)
    engine = Compared(ours, reference(directory, dtype, page_size), 4e-2)
    drive(engine, dtype, page_size, seed=8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_quantized_models_compute_nearly_what_their_rounded_weights_say(
    directory: Path, dtype: torch.dtype, bits: int
) -> None:
    theirs = reference(directory, dtype, 16)
    round_weights(theirs, bits)
    ours = native(directory, dtype, 16, NUM_THREADS[dtype], bits=bits)
    drive(Compared(ours, theirs, QUANTIZED_TOLERANCE), dtype, 16, seed=7)


FILTERS = [
    (0, 1.0, 0.0),
    (20, 1.0, 0.0),
    (0, 0.9, 0.0),
    (300, 0.8, 0.0),
    (0, 1.0, 0.05),
    (1, 1.0, 0),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_kernels_draw_the_tokens_that_torch_draws(
    tmp_path: Path, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    """Draws that are within rounding of the border of two tokens can differ."""
    engine, count = native(tiny_llama(tmp_path), torch.float32, 16), 200
    logits = spread * torch.randn(count, 5001, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([0.5, 1.0, 1.7, 0.0] * (count // 4))
    rows = SamplingRows(
        greedy=temperature == 0,
        temperature=temperature,
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        seed=torch.arange(count),
        position=torch.arange(count) * 7,
        min_p=torch.full((count,), min_p) if min_p else None,
    )
    same = engine.sample(logits, rows) == sample(logits, rows)
    assert same.sum() >= count - 2
    assert same[temperature == 0].all()


def test_the_kernels_choose_no_token_that_is_barred(tmp_path: Path) -> None:
    engine, count = native(tiny_llama(tmp_path), torch.float32, 16), 100
    logits = torch.full((count, 1000), float("-inf"))
    logits[:, 700:703] = 0.5
    rows = SamplingRows(
        greedy=torch.zeros(count, dtype=torch.bool),
        temperature=torch.ones(count),
        top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.ones(count),
        seed=torch.arange(count),
        position=torch.zeros(count, dtype=torch.int64),
    )
    assert set(engine.sample(logits, rows).tolist()) == {700, 701, 702}
    for value in (float("nan"), float("inf"), float("-inf")):
        assert set(engine.sample(torch.full((count, 1000), value), rows).tolist()) == {NO_SAMPLE}
    for value in (float("nan"), float("inf")):
        logits[::2, 999] = value
        tokens = engine.sample(logits, rows).tolist()
        assert set(tokens[::2]) == {NO_SAMPLE}
        assert set(tokens[1::2]) == {700, 701, 702}


def test_panels_hold_sixteen_outputs_side_by_side() -> None:
    weight = torch.arange(20 * 6, dtype=torch.float32).view(20, 6)
    panels = to_panels(weight).view(torch.float32)
    assert panels.shape == (2, 6, 16)
    assert torch.equal(panels[0, 3], weight[:16, 3])
    assert torch.equal(panels[1, 5, :4], weight[16:, 5])
    assert not panels[1, :, 4:].any()


def test_paired_panels_have_two_units_of_a_column_side_by_side() -> None:
    """For ARM64: each 4 bfloat16 inputs of a column, and 8 codes; zeros fill an odd last unit."""
    weight = torch.arange(16 * 6, dtype=torch.bfloat16).view(16, 6)
    panels = to_panels(weight, paired=True).view(torch.bfloat16).view(2, 16, 4)
    assert torch.equal(panels[0], weight[:, :4])
    assert torch.equal(panels[1], torch.nn.functional.pad(weight[:, 4:], (0, 2)))
    # Unit by unit, a code has the number of its unit and of its column.
    codes = (16 * torch.arange(8)[:, None] + torch.arange(16))[..., None].expand(8, 16, 4)
    lines = lines_of(codes, paired=True)
    for pair, half in itertools.product(range(4), range(2)):
        words = lines[2 * pair + half, :, 0].tolist()
        expected = [16 * (2 * pair + i) + 8 * half + column for column in range(8) for i in (0, 1)]
        assert words == expected
    assert torch.equal(lines_of(codes, paired=False), codes)


def test_panels_of_bfloat16_hold_pairs_of_inputs() -> None:
    weight = torch.randn(16, 8).bfloat16()
    pairs = to_panels(weight).view(torch.bfloat16).view(1, 4, 16, 2)
    assert torch.equal(pairs[0, 2, 5], weight[5, 4:6])


def test_gate_and_up_take_turns_by_sixteen() -> None:
    gate, up = torch.arange(20.0), 100 + torch.arange(20.0)
    mixed = interleave(torch.cat((gate, up)))
    assert mixed.shape == (64,)
    assert torch.equal(mixed[:16], gate[:16])
    assert torch.equal(mixed[16:32], up[:16])
    assert torch.equal(mixed[48:52], up[16:])


@pytest.mark.parametrize(("bits", "bytes_a_group"), [(8, 34), (4, 20)])
def test_quantized_panels_take_the_bytes_that_they_promise(bits: int, bytes_a_group: int) -> None:
    panels = to_quantized_panels(quantize(torch.randn(48, 96), bits))
    assert panels.shape == (3, round_up(3 * 16 * bytes_a_group, 64) // 4)
