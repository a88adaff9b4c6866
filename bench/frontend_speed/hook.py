"""Puts paced workers in the place of a server's workers; its import loads no torch."""

import os
from functools import partial

from bench.metrics.percentiles import MS
from quadriga.runtime.child import HOOK_VARIABLE

STEP_MS_VARIABLE = "QUADRIGA_BENCH_STEP_MS"


def paced_environment(step_ms: float) -> dict[str, str]:
    """Return the environment variables of a server whose workers take `step_ms` for each step."""
    return {HOOK_VARIABLE: f"{__name__}:install", STEP_MS_VARIABLE: str(step_ms)}


def install(name: str) -> None:
    """Change a worker's start before it begins; other processes stay as they are."""
    if name.partition("/")[0] != "worker_proc":
        return
    from bench.frontend_speed import paced_worker
    from worker_proc import main

    step_s = float(os.environ[STEP_MS_VARIABLE]) / MS
    main.start = partial(paced_worker.start, step_s)  # type: ignore[assignment]
