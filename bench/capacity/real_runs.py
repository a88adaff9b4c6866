"""Runs against the real server, and the measurement of its steps."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench.cli.options import parse
from bench.load.synthetic import TraceSpec
from bench.report.report import Result
from bench.serving import open_runs
from bench.simulate import cost_model
from bench.simulate.cost_model import CostModel
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ServerFailed

MIN_REQUESTS = 20
FIT_REPEATS = 2
MAX_SHOWN_LINES = 10


class RealServer:
    """A running server that is measured at several rates with the load of the `flags`."""

    def __init__(self, endpoint: str, curve_dir: str, flags: Sequence[str], seed: int) -> None:
        keys = ["--curve-dir", curve_dir] if curve_dir else []
        self._argv = [
            "--endpoint",
            endpoint,
            *keys,
            *flags,
            "--no-stop-on-eos",
            "--report",
            "table",
        ]
        self._seed = seed

    async def run(self, rate: float, seconds: float) -> tuple[TraceSpec, Result]:
        """Return the load and the result of a run of about `seconds` at a rate.

        Every run has prompts of its own, so that the prefix cache holds none of them.
        """
        count = max(MIN_REQUESTS, round(rate * seconds))
        self._seed += 1
        argv = ["--request-rate", f"{rate:.4g}", "--num-requests", str(count)]
        options = parse([*self._argv, *argv, "--seed", str(self._seed)])
        assert options.load.spec is not None
        async with AsyncExitStack() as stack:
            runs = await open_runs(options, stack)
            await runs.warm_up(0)
            return options.load.spec, await runs.measure(0)


async def measure_cost_model(config: ServerConfig, path: Path) -> CostModel:
    """Measure the model's steps on this machine in a process of its own, and write them to `path`.

    Raises:
        ServerFailed: The measurement failed; has the end of its output.
    """
    command = ["-m", "bench.simulate.fit_cost_model", "--quick", "--repeats", str(FIT_REPEATS)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--out", str(path), *config.to_argv(),
        cwd=Path(__file__).resolve().parents[2],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if sys.stderr.isatty() else asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = output.decode(errors="replace").splitlines()[-MAX_SHOWN_LINES:]
        raise ServerFailed("the model's steps were not measured:\n" + "\n".join(lines))
    return cost_model.load(path)
