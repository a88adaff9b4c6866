"""The bench client: `python -m bench.serving --model gpt2 --num-requests 32 ...`.

Sends requests to a server as a streaming client does and prints what the client saw of it.
Exit codes: 0 all requests finished, 1 some failed, 2 bad flags, 3 no server, 130 interrupted.
"""

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from tqdm import tqdm

from bench.cli.options import Options, parse
from bench.client.load_generator import Run, drive
from bench.client.resources import Reading, cost_between, cpu_seconds, pids_of, resident_bytes
from bench.client.server import OwnServer
from bench.client.transport import HTTPConnection, OpenAIServer, connection
from bench.load.trace import TraceRequest, write_trace
from bench.load.workload import PlannedRequest
from bench.metrics.metrics import Summary, summarize
from bench.preparation import Preparation, preparation
from bench.report import report, report_files
from bench.report import sglang_format as sglang_format
from bench.report.report import Result
from quadriga import clock
from quadriga.errors import (
    ConfigError,
    InvalidRequest,
    ModelError,
    QuadrigaError,
    ServerUnreachable,
)

EXIT_OK, EXIT_FAILED_REQUESTS, EXIT_USAGE, EXIT_NO_SERVER, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
CONNECT_SECONDS = 5.0
START_CONNECT_SECONDS = 1.0
"""Per attempt, while a server of our own starts."""
START_INFO_SECONDS = 2.0
MAX_CONNECTIONS = 64
"""More clients than that share them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench of a command line; the exit code."""
    try:
        options = parse(list(sys.argv[1:] if argv is None else argv))
        draw = _plotter(options)
        prepared = preparation(options) if options.server else None
        return run_until_signal(bench(options, prepared, draw))
    except (ConfigError, InvalidRequest, ModelError) as error:
        return _say(error, EXIT_USAGE)
    except QuadrigaError as error:
        return _say(error, EXIT_NO_SERVER)
    except (asyncio.CancelledError, KeyboardInterrupt):
        return _say("interrupted", EXIT_INTERRUPTED)


async def bench(
    options: Options,
    prepared: Preparation | None = None,
    draw: Callable[[Result], None] = lambda result: None,
) -> int:
    """Start or find the server, run warm-ups and measured runs, print and write the results.

    draw: is given the first measured run.
    """
    async with AsyncExitStack() as stack:
        runs = await open_runs(options, stack, prepared)
        warmups = [await runs.warm_up(number) for number in range(options.warmup_runs)]
        results = [await runs.measure(number) for number in range(options.repeat_runs)]
    if len(results) > 1:
        print(report.over_runs(results))
    if options.result_path is not None:
        report_files.append_json(
            options.result_path,
            [sglang_format.document(options, result, report_files.now()) for result in results],
        )
    if options.json_path is not None:
        report_files.write_json(options.json_path, options, runs.info, results, warmups)
    draw(results[0])
    failed = sum(s.failed for s in [*warmups, *(result.summary for result in results)])
    return EXIT_FAILED_REQUESTS if failed else EXIT_OK


async def open_runs(
    options: Options, stack: AsyncExitStack, prepared: Preparation | None = None
) -> "Runs":
    """A server that serves, and connections to it; the stack closes them."""
    server, info = await _server(options, stack)
    clients = [
        await stack.enter_async_context(connection(server, CONNECT_SECONDS, options.curve_dir))
        for _ in range(_num_connections(server, options.workload.requests))
    ]
    if prepared is None:
        prepared = preparation(options, str(info.get("model", "")))
    return Runs(options, clients, info, prepared)


class Runs:
    """The runs of one bench, on connections that stay open. info: of the server, at the start."""

    def __init__(
        self,
        options: Options,
        clients: Sequence[HTTPConnection],
        info: Mapping[str, Any],
        prepared: Preparation,
    ) -> None:
        self._options = options
        self._clients = clients
        self.info = info
        self._vocab_size = info.get("vocab_size") or prepared.vocab_size
        self._prepare = prepared.prepare

    async def warm_up(self, number: int) -> Summary:
        """One warm-up, with prompts that no measured run uses."""
        print(f"=== warmup {number + 1}/{self._options.warmup_runs} ===", flush=True)
        jobs = self._jobs(self._options.repeat_runs + number)
        summary = (await self._run(jobs, "warmup"))[0].summary
        if summary.failed:
            print(report.failures(summary), flush=True)
        return summary

    async def measure(self, number: int) -> Result:
        """One measured run, printed."""
        runs = self._options.repeat_runs
        if runs > 1:
            print(f"=== run {number + 1}/{runs} ===", flush=True)
        jobs = self._jobs(number)
        result, run = await self._run(jobs, "run")
        print(report.block(self._options, result))
        print(sglang_format.block(self._options, result), flush=True)
        if number == 0 and self._options.save_trace is not None:
            write_trace(self._options.save_trace, as_sent(jobs, run))
        return result

    def _jobs(self, run: int) -> Sequence[PlannedRequest]:
        return self._prepare(self._options.workload.jobs(run, self._vocab_size))

    async def _run(self, jobs: Sequence[PlannedRequest], title: str) -> tuple[Result, Run]:
        options = self._options
        before = await self._read()
        hidden = not sys.stderr.isatty()
        with tqdm(total=len(jobs), desc=title, unit="req", leave=False, disable=hidden) as bar:
            run = await drive(
                self._clients,
                jobs,
                options.params,
                options.gap,
                options.truncate,
                on_done=lambda: bar.update(),
                limit=options.limit,
            )
        after = await self._read()
        summary = summarize(run.records, run.submit_wall, options.slo)
        return Result(summary, cost_between(before, after), run.records, after.info), run

    async def _read(self) -> Reading:
        """The counters now. A server that is gone has none; its requests tell what happened."""
        client = self._clients[0]
        try:
            info = await client.info()
        except QuadrigaError:
            info = {}
        pids = pids_of(info, client.endpoint)
        return Reading(clock.now(), info, cpu_seconds(pids), resident_bytes(pids))


def _plotter(options: Options) -> Callable[[Result], None]:
    """Draws a run into the file of --plot. ConfigError at once where that cannot work."""
    path = options.plot
    if path is None:
        return lambda result: None
    try:
        from bench.report import run_plots
    except ImportError as error:
        raise ConfigError(
            f"--plot needs {error.name}, which is not installed: pip install 'quadriga[plot]'"
        ) from None

    def draw(result: Result) -> None:
        rate = result.summary.throughput or 0.0
        model, count = result.info.get("model") or options.model, result.summary.requests
        title = f"{model} · {count} requests, {result.summary.failed} failed · {rate:.0f} tok/s"
        run_plots.draw(path, result.records, title)

    return draw


def as_sent(jobs: Sequence[PlannedRequest], run: Run) -> list[TraceRequest]:
    """The trace of a run. A request without a time of its own gets that at which it was sent, and
    one whose prompt was a text gets its token ids."""
    requests = []
    for job, record in zip(jobs, run.records, strict=True):
        request = job.request
        if request.follows is None and record.due is None:
            request = dataclasses.replace(request, at=record.submit_start - run.start)
        if not request.num_own_tokens and isinstance(job.prompt, list):
            request = dataclasses.replace(request, ids=tuple(job.prompt))
        requests.append(request)
    return requests


def _num_connections(server: str | OpenAIServer, requests: Sequence[TraceRequest]) -> int:
    """HTTP brings connections of its own for requests that run at the same time."""
    if isinstance(server, OpenAIServer):
        return 1
    return min(MAX_CONNECTIONS, len({request.client for request in requests}))


async def _server(
    options: Options, stack: AsyncExitStack
) -> tuple[str | OpenAIServer, dict[str, Any]]:
    """Address and info of the server to measure, which serves from now on."""
    if options.server is None:
        running = options.openai or options.endpoint
        info = await _ask(running, options.curve_dir, CONNECT_SECONDS, CONNECT_SECONDS)
        if not info.get("ready", True):
            raise ServerUnreachable(f"the server at {options.endpoint} is still starting")
        return running, info
    server = stack.enter_context(OwnServer(options.server, options.server_log))
    info = await server.wait_ready(
        lambda: _ask(server.endpoint, options.curve_dir, START_CONNECT_SECONDS, START_INFO_SECONDS)
    )
    return server.endpoint, info


async def _ask(
    server: str | OpenAIServer, curve_dir: str, connect_timeout: float, info_timeout: float
) -> dict[str, Any]:
    async with connection(server, connect_timeout, curve_dir) as client:
        return await client.info(info_timeout)


def run_until_signal(work: Coroutine[Any, Any, int]) -> int:
    """asyncio.run, on uvloop where it is installed; a signal cancels the work in order.

    asyncio.CancelledError where one came.
    """

    async def cancel_on_signal() -> int:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        import uvloop
    except ImportError:
        return asyncio.run(cancel_on_signal())
    return uvloop.run(cancel_on_signal())


def _say(what: object, code: int) -> int:
    print(f"bench.serving: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
