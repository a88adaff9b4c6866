"""Names of the parts of a step for a profiler (--enable-nvtx; `nsys profile`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from worker_proc.runner import Runner

OF_THE_RUNNER = ("launch",)
OF_THE_ENGINE = (
    "forward",
    "forward_sampled",
    "forward_argmax",
    "forward_sample",
    "decode",
    "logits",
    "sample",
    "note",
)


def mark_steps(
    runner: "Runner",
    begin: Callable[[str], AbstractContextManager[None]] = torch.cuda.nvtx.range,
) -> None:
    """From now on each of these calls is a range of its name. Costs nothing where it is not used.
    ConfigError without a card."""
    if runner.table.device.type != "cuda" and begin is torch.cuda.nvtx.range:
        raise ConfigError(f"enable_nvtx is for CUDA, the device is {runner.table.device}")
    for whose, names in ((runner, OF_THE_RUNNER), (runner.engine, OF_THE_ENGINE)):
        for name in names:
            setattr(whose, name, _marked(name, getattr(whose, name), begin))


def _marked(
    name: str, call: Callable[..., Any], begin: Callable[[str], AbstractContextManager[None]]
) -> Callable[..., Any]:
    @wraps(call)
    def marked(*arguments: Any) -> Any:
        with begin(name):
            return call(*arguments)

    return marked
