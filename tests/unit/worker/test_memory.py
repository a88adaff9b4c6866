"""What a step needs is set aside, and what cannot fit is said with its sum."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ModelArgs, SchedulerArgs, WorkerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from tests.tiny_encoders import tiny_bert
from tests.unit.worker_driver import CPU, SHAPE, runner_of
from worker_proc.models.decoder import build_model
from worker_proc.startup import build, memory_profile
from worker_proc.startup.memory_profile import (
    FirstStart,
    check_weights,
    dense_bytes,
    largest_step,
    num_plan_pages,
    num_pool_pages,
    wait_for_memory,
)
from worker_proc.step.dummy_plans import release_plan


def test_the_largest_step_is_one_that_runs(llama_dir: Path) -> None:
    args = SchedulerArgs(max_batch_size=4, max_running_requests=8, chunked_prefill_size=100)
    plan = largest_step(args, 8192, context_length=64, page_size=4)
    assert len(plan.new) == 8 and num_plan_pages(plan) == 8 * 4
    assert all(one.top_p < 1 for one in plan.new)
    result = runner_of(llama_dir, max_total_tokens=4 * 32).run(plan)
    assert len(result.token_ids) == 8 * 4
    # What copies logits in float32 is a part of it.
    assert result.logprobs is not None and len(result.logprobs.rows) == 8 * 4
    assert [piece.row for piece in result.prompt_logprobs] == [0]


def test_the_largest_step_has_the_last_prompt_tokens_and_the_running_requests_too() -> None:
    args = SchedulerArgs(max_batch_size=64, max_running_requests=256)
    plan = largest_step(args, 8192, context_length=4096, page_size=16)
    tokens = sum(len(one.token_ids) // 4 for one in plan.new)
    assert args.prefill_slack(8192) > 0
    assert tokens >= args.prefill_budget(8192) + args.prefill_slack(8192)


def test_a_long_step_is_cut_at_the_context() -> None:
    plan = largest_step(SchedulerArgs(max_batch_size=1), 8192, context_length=64, page_size=16)
    assert len(plan.new[0].token_ids) == 4 * 63


def test_the_pool_has_whole_pages_of_the_tokens_asked_for_and_no_more_than_slots_can_fill() -> None:
    args = WorkerArgs(page_size=16, max_total_tokens=100)
    assert num_pool_pages(args, SHAPE, torch.float32, CPU, max_tokens=10**6) == 6
    assert num_pool_pages(WorkerArgs(page_size=16), SHAPE, torch.float32, CPU, 1000) == 63


def test_memory_that_steps_need_is_not_given_to_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "free_memory", lambda _: 100 * 2**20)
    args = WorkerArgs(page_size=4096, mem_fraction_static=0.5)
    assert num_pool_pages(args, SHAPE, torch.float32, CPU, 10**6, step_bytes=80 * 2**20) == 10
    with pytest.raises(ConfigError, match="of 100 MiB free memory less 99 MiB for a step"):
        num_pool_pages(args, SHAPE, torch.float32, CPU, 10**6, step_bytes=99 * 2**20)


def test_weights_that_do_not_fit_are_refused_with_their_size() -> None:
    model = build_model({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
                         "n_embd": 768, "n_layer": 12, "n_head": 12})  # fmt: skip
    needed = dense_bytes(model, torch.bfloat16)
    check_weights(needed, torch.bfloat16, 2**29, CPU)
    with pytest.raises(ConfigError, match="take 237 MiB in bfloat16, but cpu has 100 MiB free"):
        check_weights(needed, torch.bfloat16, 100 * 2**20, CPU)


@pytest.mark.parametrize(
    ("dtype", "stored", "remedies"),
    [
        (torch.bfloat16, "", "take a smaller model, or more GPUs with --tp"),
        (torch.float32, "", "half the bytes with --dtype bfloat16, or more GPUs"),
        (torch.bfloat16, "AWQ", "do not stay as AWQ.* --tp, or --device cpu, which keeps"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_helps_in_their_format(
    dtype: torch.dtype, stored: str, remedies: str
) -> None:
    with pytest.raises(ConfigError, match=remedies):
        check_weights(2**20, dtype, 0, CPU, stored)


def test_memory_is_set_aside_for_graphs_beside_that_for_the_largest_step(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def peak(run: Callable[[], Any], device: torch.device) -> int:
        run()
        ran.append(int(runner.table.num_computed.sum()))
        return ran[-1]

    runner = runner_of(llama_dir, max_total_tokens=4 * 64)
    monkeypatch.setattr(build, "peak_gpu_bytes", peak)
    monkeypatch.setattr(build, "GPU_PREFILL_TOKENS", 64)
    config = ServerConfig().replace(max_batch_size=4, max_running_requests=8, page_size=4)
    whole = build._measure_step(config, 64, lambda pages: runner)
    runner.run(release_plan(8))
    runner.engine.max_graph_tokens = 16
    assert build._measure_step(config, 64, lambda pages: runner) == whole + 16
    assert ran == [whole, whole, 16]


def test_the_largest_step_of_an_encoder_gives_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny_bert(tmp_path), attention_backend="torch")
    results: list[Any] = []
    monkeypatch.setattr(build, "peak_gpu_bytes", lambda run, device: results.append(run()))
    monkeypatch.setattr(build, "GPU_PREFILL_TOKENS", 64)
    config = ServerConfig().replace(max_batch_size=4, max_running_requests=8, page_size=4)
    build._measure_step(config, runner.table.context_length, lambda pages: runner)
    assert len(results[0].vectors) == 8


class Memory:
    """Free memory that comes back while a test sleeps, by 10 bytes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_most: int) -> None:
        self.now = 0.0
        self.at_most = at_most
        monkeypatch.setattr(memory_profile, "free_memory", self.free)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def free(self, device: torch.device) -> int:
        return min(self.at_most, int(10 * self.now))

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_restart_waits_for_the_memory_of_the_worker_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(monkeypatch, at_most=200)
    wait_for_memory(CPU, 100)
    assert 10 <= memory.now < 11 and not caplog.messages
    wait_for_memory(CPU, 201)
    assert memory.now > memory_profile.MEMORY_WAIT_S and "another process" in caplog.text


def test_a_restart_keeps_the_size_of_the_pool_if_memory_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = WorkerArgs(page_size=4096, mem_fraction_static=0.5)
    first = FirstStart(used_bytes=0, num_pages=20)  # of a MiB each
    monkeypatch.setattr(memory_profile, "free_memory", lambda _: 30 * 2**20)
    assert num_pool_pages(args, SHAPE, torch.float32, CPU, 10**6, 0) == 15
    assert num_pool_pages(args, SHAPE, torch.float32, CPU, 10**6, 0, first=first) == 20
    assert not caplog.messages
    assert num_pool_pages(args, SHAPE, torch.float32, CPU, 10**6, 2**24, first=first) == 7
    assert "7 pages after this restart, and had 20" in caplog.text


def test_the_first_start_leaves_its_sizes_for_a_restart(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_profile, "free_memory", lambda _: 2**20)
    config = ServerConfig().replace(device="cpu", dtype="float32", page_size=4)
    files = resolve_model(ModelArgs(model=str(llama_dir)))

    def pool() -> int:
        return build.make_runner(config, files, run_dir=tmp_path).table.num_pages

    pages = pool()
    monkeypatch.setattr(memory_profile, "free_memory", lambda _: 2**19)
    first = FirstStart.read(FirstStart.path(tmp_path, 0))
    assert first is not None and first.num_pages == pool() == pages
    FirstStart.path(tmp_path, 0).unlink()
    assert pool() < pages
