"""Runners of tiny models with Triton's kernels, and the graphs that they capture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_models import tiny_llama, tiny_mistral
from tests.triton_device import DEVICE
from tests.unit.worker_driver import Driver, prompts_of, runner_of
from worker_proc.gpu.engine import TritonEngine
from worker_proc.gpu.graphs import Capture, Captured, CudaCapture, GraphOutput
from worker_proc.step.runner import Runner

# Steps of 2 rows are padded to 3, and steps of 4 rows run without a graph.
GRAPH_SIZES = [1, 3]


def capture_on_a_cpu(run: Callable[[], GraphOutput]) -> Captured:
    """What a graph does: the same again, from the same places to the same places."""
    decoded = run()

    def replay() -> None:
        for place, result in zip(decoded, run(), strict=True):
            place.copy_(result)

    return replay, decoded


def capture() -> Capture:
    return CudaCapture() if DEVICE.type == "cuda" else capture_on_a_cpu


# One layer: Triton's interpreter takes long for each program of a grid.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
}


def small_llama(directory: Path) -> Path:
    """Write a Llama of one layer."""
    return tiny_llama(directory, **SMALL)


def small_mistral(directory: Path) -> Path:
    """Write a Mistral of one layer with a window of 6 tokens."""
    return tiny_mistral(directory, **SMALL, sliding_window=6)


def runner_with(
    directory: Path, capture: Capture | None, drafts: bool = False, **flags: object
) -> Runner:
    """Build a runner with graphs of decode steps of 1 and 3 rows, and of 4 and 8 prompt tokens."""
    flags = {"device": str(DEVICE), "attention_backend": "triton", **flags}
    plain = runner_of(directory, max_total_tokens=512, disable_cuda_graph=True, **flags)
    table, deterministic = plain.table, "enable_deterministic_inference" in flags
    assert isinstance(plain.engine, TritonEngine)
    engine = TritonEngine(
        plain.engine.model, table.num_pages, table.page_size, plain.dtype, DEVICE,
        deterministic, GRAPH_SIZES, capture, prompt_sizes=[4, 8], drafts=drafts,
    )  # fmt: skip
    engine.capture_graphs(table)
    return Runner(engine, table, plain.dtype)


def tokens_of(runner: Runner) -> list[list[int]]:
    """Greedy rows, drawn rows, and one with a filter; steps of one to four rows."""
    driver = Driver(runner)
    prompts = prompts_of([3, 4, 3, 2])
    first, second = driver.add(prompts[0]), driver.add(prompts[1])
    driver.generate([first, second], 2)
    drawn = driver.add(prompts[2], temperature=0.8, seed=4)
    driver.step((first, 1), (second, 1), (drawn, 3))
    driver.step((first, 1), (second, 1), (drawn, 1))
    filtered = driver.add(prompts[3], temperature=0.8, top_k=5, top_p=0.9, seed=5)
    driver.step((filtered, 2))
    driver.step((filtered, 1))
    requests = [first, second, drawn, filtered]
    driver.step(*((request, 1) for request in requests))
    return [request.output for request in requests]
