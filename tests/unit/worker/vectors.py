"""Vectors of prompts that a runner computes in one step."""

import numpy as np

from quadriga.sampling.pooling import Pooling
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import StepResult
from tests.unit.worker_driver import Driver
from worker_proc.step.runner import Runner


def vectors_of(runner: Runner, prompts: list[list[int]], pooling: Pooling) -> list[np.ndarray]:
    """Return the vectors of prompts that are computed in one step."""
    return vectors_of_each(runner, prompts, [pooling] * len(prompts))


def vectors_of_each(
    runner: Runner, prompts: list[list[int]], poolings: list[Pooling]
) -> list[np.ndarray]:
    """Return the vectors of prompts, each with its pooling, that are computed in one step."""
    driver = Driver(runner)
    requests = [driver.add(prompt) for prompt in prompts]
    for request, pooling in zip(requests, poolings, strict=True):
        driver.set_pooling(request, pooling)
    result: StepResult = runner.run(driver.plan([(r, len(r.prompt)) for r in requests]))
    assert result.token_ids == pack_ids([-1] * len(prompts)), "no token is sampled"
    by_row = {row.row: np.frombuffer(row.vector, dtype="<f4") for row in result.vectors}
    runner.table.release_all()
    return [by_row[row] for row in range(len(prompts))]
