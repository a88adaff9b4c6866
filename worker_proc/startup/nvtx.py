"""Ranges of a step's parts for a profiler (--enable-nvtx, `nsys profile`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from quadriga.errors import ConfigError
from worker_proc.runner import Runner

RUNNER_METHODS = ("launch",)
ENGINE_METHODS = ("execute", "forward_and_sample", "forward", "logits", "sample_rows", "sample")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def mark_steps(
    runner: Runner,
    begin_range: Callable[[str], AbstractContextManager[None]] = torch.cuda.nvtx.range,
) -> None:
    """Put each further call of the methods above into a range of the method's name.

    A range costs next to nothing where no profiler listens.

    Raises:
        ConfigError: The device is no GPU.
    """
    if runner.table.device.type != "cuda" and begin_range is torch.cuda.nvtx.range:
        raise ConfigError(f"enable_nvtx is for CUDA, the device is {runner.table.device}")
    for marked, names in ((runner, RUNNER_METHODS), (runner.engine, ENGINE_METHODS)):
        for name in names:
            setattr(marked, name, _in_range(name, getattr(marked, name), begin_range))


def _in_range(
    name: str,
    call: Callable[Parameters, Result],
    begin_range: Callable[[str], AbstractContextManager[None]],
) -> Callable[Parameters, Result]:
    @wraps(call)
    def in_range(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with begin_range(name):
            return call(*args, **kwargs)

    return in_range
