"""What a step needs is set aside, and what cannot fit is said with its sum."""

from pathlib import Path

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import SchedulerArgs, WorkerArgs
from tests.unit.worker_driver import CPU, SHAPE, runner_of
from worker_proc.models.decoder import build_model
from worker_proc.startup import memory_profile
from worker_proc.startup.memory_profile import (
    check_weights,
    largest_step,
    num_plan_pages,
    num_pool_pages,
)


def test_the_largest_step_is_one_that_runs(llama_dir: Path) -> None:
    args = SchedulerArgs(max_batch_size=4, max_running_requests=8, chunked_prefill_size=100)
    plan = largest_step(args, 8192, context_length=64, page_size=4)
    assert len(plan.new) == 8 and num_plan_pages(plan) == 8 * 4
    assert all(one.top_p < 1 for one in plan.new)
    result = runner_of(llama_dir, max_total_tokens=4 * 32).run(plan)
    assert len(result.token_ids) == 8 * 4


def test_the_largest_step_has_the_last_prompt_tokens_and_the_running_requests_too() -> None:
    args = SchedulerArgs(max_batch_size=64, max_running_requests=256)
    plan = largest_step(args, 8192, context_length=4096, page_size=16)
    tokens = sum(len(one.token_ids) // 4 for one in plan.new)
    assert args.prefill_slack(8192) > 0
    assert tokens >= args.prefill_budget(8192) + args.prefill_slack(8192)


def test_a_long_step_is_cut_at_the_context() -> None:
    plan = largest_step(SchedulerArgs(max_batch_size=1), 8192, context_length=64, page_size=16)
    assert len(plan.new[0].token_ids) == 4 * 63


def test_memory_that_steps_need_is_not_given_to_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "free_memory", lambda _: 100 * 2**20)
    args = WorkerArgs(page_size=4096, mem_fraction_static=0.5)
    assert num_pool_pages(args, SHAPE, torch.float32, CPU, 10**6, step_bytes=80 * 2**20) == 10
    with pytest.raises(ConfigError, match="of 100 MiB free memory less 99 MiB for a step"):
        num_pool_pages(args, SHAPE, torch.float32, CPU, 10**6, step_bytes=99 * 2**20)


def test_weights_that_do_not_fit_are_refused_with_their_size() -> None:
    model = build_model({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
                         "n_embd": 768, "n_layer": 12, "n_head": 12})  # fmt: skip
    check_weights(model, torch.bfloat16, 2**29, CPU)
    with pytest.raises(ConfigError, match="take 237 MiB in bfloat16, but cpu has 100 MiB free"):
        check_weights(model, torch.bfloat16, 100 * 2**20, CPU)
