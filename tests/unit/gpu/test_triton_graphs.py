"""Decode steps that are replayed: padding, batch sizes, and the same tokens as without."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.errors import ConfigError
from tests.tiny_experts import tiny_mixtral
from tests.tiny_models import tiny_gpt2
from tests.unit.gpu.graphs import (
    SMALL,
    capture,
    capture_on_a_cpu,
    runner_with,
    small_llama,
    tokens_of,
)
from tests.unit.worker_driver import Driver, prompts_of
from worker_proc.gpu.graphs import (
    Captured,
    DecodeGraphs,
    DecodeInputs,
    GraphOutput,
    PromptGraphs,
    PromptInputs,
    PromptStep,
    batch_sizes,
    prompt_sizes,
)
from worker_proc.step.clock import HostStep

CPU = torch.device("cpu")


@pytest.mark.parametrize("most", [1, 2, 3, 8, 17, 64, 100, 512])
def test_batch_sizes_reach_the_largest_and_pad_little(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows <= max(3, rows / 8)


def test_a_step_is_padded_to_the_next_size_with_rows_of_no_slot() -> None:
    seen: list[list[list[int]]] = []

    def decode(inputs: DecodeInputs, is_long: bool) -> GraphOutput:
        seen.append([inputs.slots.tolist(), inputs.positions.tolist()])
        return GraphOutput(inputs.slots[:, None].float(), inputs.positions + 100 * is_long)

    progress: list[tuple[int, int]] = []
    graphs = DecodeGraphs(
        decode, [1, 4], lambda size: size > 1, CPU, capture_on_a_cpu,
        lambda *done: progress.append(done),
    )  # fmt: skip
    assert [len(inputs[0]) for inputs in seen] == [4, 4, 1], "the largest are captured first"
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert graphs.max_rows == 4
    slots, positions, clock = np.array([7, 3]), np.array([5, 9]), HostStep()
    decoded = graphs.run(slots, positions, False, clock)
    assert seen[-1] == [[7, 3, -1, -1], [5, 9, 0, 0]]
    assert decoded.token_ids.tolist() == [5, 9] and len(decoded.logits) == 2
    assert graphs.run(slots, positions, True, clock).token_ids.tolist() == [105, 109]
    alone = graphs.run(slots[:1], positions[:1], True, clock)
    assert alone.token_ids.tolist() == [5], "one row has no graph for long contexts"


def test_a_step_with_prompts_is_padded_to_the_next_number_of_tokens() -> None:
    seen: list[list[object]] = []

    def compute(inputs: PromptInputs) -> GraphOutput:
        seen.append([part.tolist() for part in inputs])
        return GraphOutput(inputs.sampled[:, None].float(), inputs.sampled_positions + 1)

    graphs = PromptGraphs(compute, [4, 8], 2, 2, 4, CPU, capture_on_a_cpu, lambda *_: None)
    step = PromptStep(
        np.array([5, 6, 6]), np.array([9, 0, 1]), np.array([[6, 5], [0, 9], [1, 0], [2, 1]]),
        np.array([0, 2]), np.array([5, 6]), np.array([9, 1]),
    )  # fmt: skip
    output = graphs.run(step, HostStep())
    assert output is not None and output.token_ids.tolist() == [10, 2]
    assert seen[-1][:2] == [[5, 6, 6, -1], [9, 0, 1, 0]]
    assert seen[-1][2] == [[6, 5, -1], [0, 9, 0], [1, 0, 0], [2, 1, 0]]
    assert seen[-1][3:] == [[0, 2], [5, 6], [9, 1]]
    too_many = PromptStep(*(np.repeat(part, 3, axis=-1) for part in step))
    assert graphs.run(too_many, HostStep()) is None
    crowded = step._replace(blocks=np.repeat(step.blocks, 2, axis=1))
    assert graphs.run(crowded, HostStep()) is None


def test_prompt_sizes_pad_by_a_quarter_up_to_what_a_step_can_have() -> None:
    assert prompt_sizes(100, 10**10) == [32, 64, 96]
    sizes = prompt_sizes(10**6, 10**10)
    assert sizes[:8] == list(range(32, 257, 32)) and sizes[-2:] == [896, 1024]
    assert all(larger <= 1.25 * size for size, larger in pairwise(sizes[7:]))
    assert prompt_sizes(10**6, 240_000_000)[-2:] == [3584, 4096]
    assert prompt_sizes(2000, 10**6)[-2:] == [1536, 1792]


def small_mixtral(directory: Path) -> Path:
    """Write a Mixtral of one layer with a window of 6 tokens."""
    return tiny_mixtral(directory, **SMALL, num_local_experts=3, sliding_window=6)


@pytest.mark.parametrize(("build", "deterministic"), [(small_llama, True), (small_mixtral, False)])
def test_replayed_steps_give_the_tokens_of_steps_that_are_not(
    tmp_path: Path, deterministic: bool, build: Callable[[Path], Path]
) -> None:
    directory = build(tmp_path)
    flags = {"enable_deterministic_inference": True} if deterministic else {}
    replayed = tokens_of(runner_with(directory, capture(), **flags))
    assert replayed == tokens_of(runner_with(directory, None, **flags))


def test_a_token_of_a_prompt_is_not_taken_for_a_row_that_decodes(tmp_path: Path) -> None:
    """Chunks of one token of a prompt, whose next token is known."""
    directory = tiny_gpt2(tmp_path, n_layer=1, n_head=2)
    outputs = []
    for capturing in (capture(), None):
        driver = Driver(runner_with(directory, capturing))
        requests = [driver.add(prompt) for prompt in prompts_of([2, 3])]
        driver.generate(requests, 2, chunk=1)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


def test_memory_that_runs_out_in_a_capture_is_said_with_the_remedy(tmp_path: Path) -> None:
    def full(run: Callable[[], GraphOutput]) -> Captured:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match="as CUDA graphs were captured: start with a lower"):
        runner_with(small_llama(tmp_path), full)


def test_an_engine_says_how_large_its_graphs_will_be(tmp_path: Path) -> None:
    assert runner_with(small_llama(tmp_path), None).engine.max_graph_tokens == 0
    assert runner_with(tmp_path, capture()).engine.max_graph_tokens == 8
