"""Run a simulation in a process of its own, off the way of requests."""

import asyncio
import os
from contextlib import suppress

import msgspec

from http_proc.protocol.errors import ApiError, invalid
from quadriga.programs import command_of
from quadriga.what_if import WhatIfJob

MODULE = "bench.simulate.what_if.beside_server"
TIMEOUT_S = 300.0  # it has the lowest priority, so that a busy machine makes it slow
RETRY_S = 5.0
USAGE_ERROR = 2
# Each further thread of numpy's library takes address space, which is bounded.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


class SimulationProcess:
    """At most one simulation at a time."""

    def __init__(self) -> None:
        self._is_running = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, job: WhatIfJob) -> bytes:
        """Return the JSON of a WhatIfAnswer. A caller that is cancelled ends the process.

        Raises:
            ApiError: another one runs, the flags do not go together, or it takes too long.
        """
        if self._is_running:
            raise ApiError(
                429,
                f"a simulation runs: try again in {RETRY_S:g} s",
                "rate_limit_error",
                code="simulation_running",
                retry_after=RETRY_S,
            )
        self._is_running = True
        try:
            return await self._run(msgspec.json.encode(job))
        finally:
            self.end()
            self._is_running = False

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process = None

    async def _run(self, job: bytes) -> bytes:
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            *command_of(MODULE), stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | ONE_THREAD
        )
        timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self.end)
        try:
            answer, complaint = await process.communicate(job)
        finally:
            timer.cancel()
        if process.returncode == 0:
            return answer
        text = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode == USAGE_ERROR:
            raise invalid(text, "variants")
        if process.returncode is not None and process.returncode < 0:
            raise ApiError(
                504,
                "the simulation took too long or too much memory: give a smaller last_s, or fewer"
                " variants",
                "timeout_error",
                code="simulation_too_long",
            )
        raise ApiError(500, f"the simulation failed: {text}", "server_error")
