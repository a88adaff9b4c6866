"""Measure a server as a streaming client: `python -m bench.serving --num-requests 32 ...`.

Exit codes: 0 all requests finished, 1 some failed, 2 bad flags, 3 no server, 130 interrupted.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import msgspec

from bench.cli.command import EXIT_FAILED, EXIT_OK, run_command, run_until_signal
from bench.cli.options import PROG, Options, Preparation, parse, preparation
from bench.client.backends import OpenAIServer, ServerConnection
from bench.client.load_generator import LoadRun, drive
from bench.client.resources import Reading, cost_between, cpu_seconds, pids_of, resident_bytes
from bench.client.server import connection, info_of, start_server
from bench.load.workload import PlannedRequest
from bench.report import files, metrics, report
from bench.report import report as overview
from bench.report.report import Progress, Result
from quadriga import clock, errors
from quadriga.programs import install_command
from simulator.trace import TraceRequest, write_trace

CONNECT_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
NUM_WARMUP_REQUESTS = 4  # of a warm-up that is no whole run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench that a command line describes, and return the exit code.

    `quadriga bench` passes its arguments as `argv`.
    """
    if argv is None:
        return run_command("bench.serving", lambda: _main(sys.argv[1:], PROG))
    return run_command("quadriga bench", lambda: _main(list(argv), "quadriga bench"))


def _main(argv: list[str], prog: str) -> int:
    options = parse(argv, prog)
    draw = _plotter(options)
    prepared = preparation(options) if options.target.config else None
    return run_until_signal(bench(options, prepared, draw))


async def bench(
    options: Options,
    prepared: Preparation | None = None,
    draw: Callable[[Result], None] = lambda _: None,
) -> int:
    """Start or find the server, run warm-ups and measured runs, print and write the results.

    `draw` draws the first measured run.
    """
    async with AsyncExitStack() as stack:
        runs = await open_runs(options, stack, prepared)
        warmups = [await runs.warm_up(number) for number in range(options.warmup_runs)]
        results = [await _measured(options, runs, n) for n in range(options.repeat_runs)]
    if len(results) > 1:
        print(report.over_runs(results))
    output = options.output
    if output.result_path is not None:
        files.append_json(
            output.result_path, [files.document(options, result, files.now()) for result in results]
        )
    if output.json_path is not None:
        files.write_json(output.json_path, options, runs.info, results, warmups)
    draw(results[0])
    failed = sum(s.failed for s in [*warmups, *(result.summary for result in results)])
    return EXIT_FAILED if failed else EXIT_OK


async def _measured(options: Options, runs: "Runs", number: int) -> Result:
    """Run and print one measured run."""
    if options.repeat_runs > 1:
        print(f"=== run {number + 1}/{options.repeat_runs} ===", flush=True)
    result = await runs.measure(number)
    print(_text(options, result), flush=True)
    return result


def _text(options: Options, result: Result) -> str:
    """Return the printed blocks of a run."""
    blocks = []
    if options.output.report == "table":
        blocks.append(overview.overview(options, result))
    elif not options.output.verbose:
        blocks.append(report.classic_block(options, result))
    if options.output.verbose:
        blocks.append(report.block(options, result))
    return "\n".join(blocks)


async def open_runs(
    options: Options, stack: AsyncExitStack, prepared: Preparation | None = None
) -> "Runs":
    """Connect to the server, starting it if necessary; the stack closes everything."""
    server, info = await _server(options, stack)
    clients = [
        await stack.enter_async_context(
            connection(server, CONNECT_TIMEOUT_S, options.target.curve_dir)
        )
        for _ in range(_num_connections(server, options.load.workload.requests))
    ]
    if prepared is None:
        prepared = preparation(options, str(info.get("model", "")))
    return Runs(options, clients, info, prepared)


class Runs:
    """The runs of one bench, on connections that stay open.

    Attributes:
        info: the server's info at the start.
    """

    def __init__(
        self,
        options: Options,
        clients: Sequence[ServerConnection],
        info: Mapping[str, Any],
        prepared: Preparation,
    ) -> None:
        self._options = options
        self._clients = clients
        self.info = info
        self._vocab_size = info.get("vocab_size") or prepared.vocab_size
        send = options.load.send
        self._send = replace(send, as_chats=send.as_chats and bool(info.get("chat")))
        self._prepare = prepared.prepare

    async def warm_up(self, number: int) -> metrics.Summary:
        """Run one warm-up, with prompts that no measured run uses."""
        if self._options.output.report == "classic":
            print(f"=== warmup {number + 1}/{self._options.warmup_runs} ===", flush=True)
        jobs = self._jobs(self._options.repeat_runs + number)
        if self._options.short_warmup:
            jobs = [_at_once(job) for job in jobs[:NUM_WARMUP_REQUESTS]]
        summary = (await self._run(jobs, "warmup"))[0].summary
        if summary.failed:
            print(report.failures(summary), flush=True)
        return summary

    async def measure(self, number: int) -> Result:
        """Return one measured run."""
        jobs = self._jobs(number)
        result, run = await self._run(jobs, "run")
        save_trace = self._options.output.save_trace
        if number == 0 and save_trace is not None:
            write_trace(save_trace, as_sent(jobs, run))
        return result

    def _jobs(self, run: int) -> Sequence[PlannedRequest]:
        return self._prepare(self._options.load.workload.jobs(run, self._vocab_size))

    async def _run(self, jobs: Sequence[PlannedRequest], title: str) -> tuple[Result, LoadRun]:
        options = self._options
        before = await self._read()
        with Progress(len(jobs), title) as progress:
            run = await drive(self._clients, jobs, self._send, on_done=progress.update)
        after = await self._read()
        summary = metrics.summarize(run.records, run.submit_wall, options.output.slo)
        return Result(summary, cost_between(before, after), run.records, after.info), run

    async def _read(self) -> Reading:
        """Read the counters. A server that is gone has none; its requests show what happened."""
        client = self._clients[0]
        try:
            info = await client.info()
        except errors.QuadrigaError:
            info = {}
        pids = pids_of(info, client.endpoint)
        return Reading(clock.now(), info, cpu_seconds(pids), resident_bytes(pids))


def _plotter(options: Options) -> Callable[[Result], None]:
    """Return the function that draws a run into the file of --plot; fail early if it cannot."""
    path = options.output.plot
    if path is None:
        return lambda _: None
    try:
        from bench.report import plots
    except ImportError as error:
        raise errors.ConfigError(
            f"--plot needs {error.name}, which is not installed: {install_command('plot')}"
        ) from None

    def draw(result: Result) -> None:
        summary = result.summary
        title = (
            overview.server_text(options, result.info),
            overview.load_text(options, summary),
            f"{summary.failed} failed" if summary.failed else "",
            f"{summary.throughput or 0.0:.0f} tokens/s",
            files.now()[:10],
        )
        plots.draw_run(path, result.records, title, options.output.slo)

    return draw


def _at_once(job: PlannedRequest) -> PlannedRequest:
    """Return the job without its arrival time; a chat's next turn still waits for its answer."""
    return PlannedRequest(msgspec.structs.replace(job.request, at=0.0), job.prompt)


def as_sent(jobs: Sequence[PlannedRequest], run: LoadRun) -> list[TraceRequest]:
    """Return the trace of a run.

    A request without a time of its own gets the time at which it was sent, and a request whose
    prompt was a text gets its token ids.
    """
    requests = []
    for job, record in zip(jobs, run.records, strict=True):
        request = job.request
        if request.follows is None and record.due is None:
            request = msgspec.structs.replace(request, at=record.submit_start - run.start)
        if not request.num_own_tokens and isinstance(job.prompt, list):
            request = msgspec.structs.replace(request, ids=tuple(job.prompt))
        requests.append(request)
    return requests


def _num_connections(server: str | OpenAIServer, requests: Sequence[TraceRequest]) -> int:
    """Return how many connections to open; an HTTP client opens one for each request itself."""
    if isinstance(server, OpenAIServer):
        return 1
    return min(MAX_CONNECTIONS, len({request.client for request in requests}))


async def _server(
    options: Options, stack: AsyncExitStack
) -> tuple[str | OpenAIServer, dict[str, Any]]:
    """Return address and info of the server to measure, once it serves."""
    target = options.target
    if target.config is None:
        running = target.openai or target.endpoint
        info = await info_of(running, target.curve_dir, CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_S)
        if not info.get("ready", True):
            raise errors.ServerUnreachable(f"the server at {target.endpoint} is still starting")
        return running, info
    return await start_server(target.config, target.server_log, stack, target.launcher)


if __name__ == "__main__":
    sys.exit(main())
