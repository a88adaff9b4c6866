"""The floor of a step, its parts, and the comparison with measured steps."""

from pathlib import Path

import pytest
import torch

from bench import worker_steps
from bench.cli.command import EXIT_USAGE
from bench.roofline import __main__ as roofline
from bench.roofline.__main__ import Line, line_of, part_table, step_table
from bench.roofline.machine_speed import (
    PARTS,
    REST,
    Kind,
    MeasuredRound,
    ProductSpeed,
    ReadSpeed,
    StepTime,
    measure,
)
from bench.roofline.model_work import work_of
from bench.roofline.roofline_model import Product, Speed, StepPart, Work, at_the_rate, floor
from bench.worker_steps import Row, WorkerBench
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.families.gpt import find_gpt2_size, gpt2_config_json
from tests.tiny_models import VOCAB_SIZE, tiny_llama
from tests.unit.worker_driver import runner_of
from worker_proc.cpu.engine import NativeEngine

LINEAR, HEAD = Product(100, 50), Product(100, 1000, sampled=True, head=True)
WORK = Work((LINEAR, HEAD), attention=((64, 32), (64, 32)), weight_bytes=2, kv_bytes=2)
SPEED = Speed(bytes_per_s=1e6, rates={LINEAR: 1e7, HEAD: 2e7})
ONE_ROW = [Row(context=10, tokens=1)]


def test_a_product_of_few_rows_takes_as_long_as_its_weights_are_read() -> None:
    assert floor(WORK, ONE_ROW, SPEED)[StepPart.LINEARS] == pytest.approx(100 * 50 * 2 / 1e6)


def test_a_product_of_many_rows_takes_as_long_as_its_operations() -> None:
    rows = ONE_ROW * 64
    assert floor(WORK, rows, SPEED)[StepPart.LINEARS] == pytest.approx(2 * 64 * 5000 / 1e7)
    assert at_the_rate(WORK, rows, SPEED) == pytest.approx(2 * 64 * (5000 / 1e7 + 100_000 / 2e7))


def test_of_the_experts_only_those_are_read_and_multiplied_that_rows_choose() -> None:
    experts = Product(100, 50, num_experts=8, num_chosen=2)
    work = Work((experts,), (), weight_bytes=2, kv_bytes=2)
    one, many = (floor(work, ONE_ROW * rows, SPEED)[StepPart.LINEARS] for rows in (1, 1000))
    assert one == pytest.approx(2 * 5000 * 2 / 1e6)
    assert many == pytest.approx(2 * 1000 * 2 * 5000 / 1e7)
    assert experts.matrices_read(2) == pytest.approx(8 * (1 - (6 / 8) ** 2))
    assert experts.matrices_read(1000) == pytest.approx(8)


def test_only_rows_that_sample_are_multiplied_after_the_last_attention() -> None:
    prompt = [Row(context=0, tokens=500)]
    chunk = [Row(context=0, tokens=500, ends=False)]
    of_one_row = Work((HEAD,), (), weight_bytes=2, kv_bytes=2)
    assert at_the_rate(of_one_row, prompt, SPEED) == pytest.approx(2 * 100_000 / 2e7)
    assert at_the_rate(of_one_row, chunk, SPEED) == 0


def test_attention_reads_keys_and_values_of_every_layer() -> None:
    rows = [Row(context=1000, tokens=1), Row(context=500, tokens=1)]
    assert floor(WORK, rows, SPEED)[StepPart.ATTENTION] == pytest.approx(
        2 * (2 * 32 * 2 * 1500 / 1e6)
    )


def test_attention_of_a_prompt_counts_what_each_token_sees() -> None:
    seen, seen_by_the_last = 3 * 2 + (1 + 2 + 3), 2 + 3
    speed = Speed(bytes_per_s=1e12, rates={LINEAR: 1e3, HEAD: 1})
    least = floor(WORK, [Row(context=2, tokens=3)], speed)
    assert least[StepPart.ATTENTION] == pytest.approx(4 * 64 * (seen + seen_by_the_last) / 1e3)
    chunk = floor(WORK, [Row(context=2, tokens=3, ends=False)], speed)
    assert chunk[StepPart.ATTENTION] == pytest.approx(4 * 64 * seen / 1e3, rel=1e-3)


def test_the_work_of_a_model_is_that_of_its_layers() -> None:
    size = find_gpt2_size("gpt2")
    assert size is not None
    work = work_of(gpt2_config_json(size), "none", 2)
    shapes = [(p.inputs, p.outputs) for p in work.products[:4]]
    assert shapes == [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    assert work.products[-1] == Product(768, 50257, head=True)
    assert len(work.products) == 12 * 4 + 1
    assert [product.sampled for product in work.products] == [False] * 45 + [True] * 4
    assert work.attention == ((768, 768),) * 12
    assert sum(p.weights for p in work.products) * work.weight_bytes == pytest.approx(
        247e6, rel=0.01
    )


@pytest.mark.parametrize(
    ("quantization", "least", "most"), [("int8", 1.0, 1.1), ("int4", 0.5, 0.7)]
)
def test_quantized_weights_are_read_with_what_lies_beside_them(
    quantization: str, least: float, most: float
) -> None:
    size = find_gpt2_size("gpt2")
    assert size is not None
    work = work_of(gpt2_config_json(size), quantization, 2)
    assert least < work.weight_bytes < most
    assert work.kv_bytes == 2


def test_matrices_of_several_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"several formats.*take int8 or int4"):
        roofline.report(ServerConfig().replace(quantization="gguf"))


def line(ms: float, rows: int | None, share: float = 0.0) -> Line:
    parts = {name: ms / len(PARTS) for name in PARTS}
    return Line("a step", ms, {StepPart.LINEARS: 6.0}, ms / 10, share, parts, rows)


@pytest.mark.parametrize(
    ("step", "holds"),
    [
        (line(11.4, rows=1), True),
        (line(11.6, rows=1), False),
        (line(12.4, rows=8), True),
        (line(12.6, rows=64), False),
        (line(99.0, rows=None, share=0.71), True),
        (line(10.0, rows=None, share=0.69), False),
    ],
)
def test_each_kind_of_step_has_its_bound(step: Line, holds: bool) -> None:
    assert step.holds == holds
    assert ("holds" if holds else "MISSED") in step_table([step])


def test_each_round_is_held_against_the_speed_of_its_own_time() -> None:
    work = Work((LINEAR, HEAD), attention=(), weight_bytes=2, kv_bytes=2)
    rounds = []
    for slowdown in (1, 3, 2):
        speed = Speed(bytes_per_s=1e6 / slowdown, rates=SPEED.rates)
        ms = 1.5 * slowdown * 1000 * 210_000 / 1e6
        steps = [StepTime(ms * noise, {"linears": ms * noise / 2}) for noise in (1, 0.5, 9)]
        rounds.append(MeasuredRound(steps, speed))
    found = line_of(Kind(rows=1, context=10), rounds, work)
    assert found.ratio == pytest.approx(1.5)
    assert found.floor_ms == pytest.approx(
        {StepPart.LINEARS: 20, StepPart.HEAD: 400, StepPart.ATTENTION: 0}
    )
    assert found.ms == pytest.approx(630)
    assert "| 315.00 (20.00) |" in part_table([found])


def test_a_model_of_a_short_context_has_its_longest_decodes_near_its_end() -> None:
    kinds = roofline.kinds_for(1024)
    assert {kind.context for kind in kinds if kind.decodes} == {128, 960}
    assert {kind.tokens for kind in kinds if not kind.decodes} == {128, 512}


@pytest.mark.parametrize("attention_backend", ["auto", "torch"])
def test_steps_of_a_real_worker_are_timed_part_by_part(
    tmp_path: Path, attention_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_steps, "MAX_TOKEN_ID", VOCAB_SIZE)
    flags = {"dtype": "bfloat16", "attention_backend": attention_backend}
    bench = WorkerBench(runner_of(tiny_llama(tmp_path), **flags))
    args = WorkerArgs(attention_backend=attention_backend)
    products = ProductSpeed([Product(96, 64), Product(96, 512, head=True)], args, torch.bfloat16)
    kinds = [Kind(rows=3, context=20), Kind(rows=1, context=0, tokens=16)]
    found = measure(bench, kinds, ReadSpeed(args, torch.bfloat16, 2**16), products)
    assert not bench.runner.table.held
    for rounds in found.values():
        steps = [step for measured in rounds for step in measured.steps]
        assert len(steps) >= 20
        assert all(r.speed.bytes_per_s > 0 < r.speed.highest_rate for r in rounds)
        for step in steps:
            if isinstance(bench.runner.engine, NativeEngine):
                assert sum(step.parts.values()) == pytest.approx(step.ms)
                assert min(step.parts[name] for name in PARTS if name != REST) > 0
            else:
                assert step.parts == {}


def test_a_model_that_cannot_be_measured_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roofline.main(["--model", "./nowhere"]) == EXIT_USAGE
    assert "there is no such file" in capsys.readouterr().err
    assert roofline.main(["--model", str(tiny_llama(tmp_path))]) == EXIT_USAGE
    assert "the context is 256 tokens" in capsys.readouterr().err
