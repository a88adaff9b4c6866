"""Compare Quadriga with one peer: both serve and take turns with the load, A B A B.

Outcomes are stored as JSON lines, and printed as a markdown table.
"""

import contextlib
import dataclasses
import io
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from bench import serving
from bench.cli.options import Options, parse
from bench.client.server import OwnServer, ServerProcess, free_port, info_of
from bench.peers.models import FILE_MODEL, ModelName, Weights, gguf_file, hugging_face_directory
from bench.peers.recipes import Peer, PeerWorkload, Start
from bench.report.metrics import Summary
from bench.report.table import markdown_table
from quadriga.errors import ConfigError, QuadrigaError, RequestFailed

# While Quadriga has its turn, the peer is stopped with SIGSTOP. Quadriga needs no stop, as its
# idle processes block and use no CPU.

READY_TIMEOUT_S = 600.0
INFO_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a comparison is run.

    Attributes:
        over: protocol by which our server is measured.
        own_flags: flags of our server, in addition to those of the comparison.
        peer_flags: flags of the peer's server, in addition to those of its recipe.
        logs: directory of the servers' logs.
        directory_of: returns the directory of a model in bfloat16.
    """

    over: Literal["zmq", "openai"]
    own_flags: tuple[str, ...]
    warmup_runs: int
    repeat_runs: int
    logs: Path
    peer_flags: tuple[str, ...] = ()
    directory_of: Callable[[ModelName], Path] = hugging_face_directory


@dataclass(frozen=True, slots=True)
class Outcome:
    """The runs of one workload in pairs: theirs[i] followed ours[i]."""

    peer: str
    weights: Weights
    workload: str
    over: str
    ours: list[Summary]
    theirs: list[Summary]


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A workload without figures, and the reason."""

    peer: str
    workload: str
    reason: str

    def __str__(self) -> str:
        return f"{self.peer}, {self.workload}: not measured: {self.reason}"


async def contest(
    peer: Peer, weights: Weights, workloads: Sequence[PeerWorkload], settings: Settings
) -> AsyncIterator[Outcome | NotMeasured]:
    """Yield the outcome of each workload; one that cannot be measured does not end the others.

    Raises:
        ConfigError: the peer cannot be installed.
    """
    async with AsyncExitStack() as stack:
        ours = _Side("ours", _own_launch(weights, settings), settings)
        theirs = _Side(peer.name, _peer_launch(peer, weights, settings), settings)
        for side in (ours, theirs):
            stack.push_async_callback(side.close)
        for workload in workloads:
            outcome = Outcome(peer.name, weights, workload.name, settings.over, [], [])
            try:
                await _take_turns(ours, theirs, peer.prompt_form, workload, outcome, settings)
            except QuadrigaError as error:
                for side in (ours, theirs):
                    await side.close()
                yield NotMeasured(peer.name, workload.name, str(error))
            else:
                yield outcome


async def _take_turns(
    ours: "_Side",
    theirs: "_Side",
    prompt_form: str,
    workload: PeerWorkload,
    outcome: Outcome,
    settings: Settings,
) -> None:
    theirs.resume()
    runs = [(side, await side.runs(workload, prompt_form)) for side in (ours, theirs)]
    turns = [(True, n) for n in range(settings.warmup_runs)]
    turns += [(False, n) for n in range(settings.repeat_runs)]
    for is_warmup, number in turns:
        for (side, runs_of_side), summaries in zip(
            runs, (outcome.ours, outcome.theirs), strict=True
        ):
            (theirs.resume if side is theirs else theirs.pause)()
            with contextlib.redirect_stdout(io.StringIO()):
                if is_warmup:
                    summary = await runs_of_side.warm_up(number)
                else:
                    summary = (await runs_of_side.measure(number)).summary
                    summaries.append(summary)
            turn = f"{workload.name} {'warm-up' if is_warmup else 'run'} {number + 1} {side.name}"
            if summary.failed:
                raise RequestFailed(
                    f"{turn}: {summary.failed} of {summary.requests} requests failed:"
                    f" {summary.first_error}"
                )
            print(f"{turn}: {summary.throughput:.1f} tok/s", file=sys.stderr, flush=True)


# --- the two sides --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Launch:
    """How the server of a side is started for a workload.

    Attributes:
        key: command line; a running server with the same key is used again.
        make: returns the server that logs to a file, and the flags of bench.serving that name it.
    """

    key: list[str]
    make: Callable[[Path], tuple[ServerProcess, list[str]]]


class _Side:
    """One side of the comparison: a server, restarted if a workload needs another command line."""

    def __init__(
        self, name: str, launch_for: Callable[[PeerWorkload], _Launch], settings: Settings
    ) -> None:
        self.name = name
        self._launch_for = launch_for
        self._settings = settings
        self._key: list[str] | None = None
        self._server: ServerProcess | None = None
        self._target: list[str] = []
        self._stack = AsyncExitStack()

    async def runs(self, workload: PeerWorkload, prompt_form: str) -> serving.Runs:
        """Return the runs of a workload, on a server that is ready."""
        launch = self._launch_for(workload)
        if launch.key != self._key:
            await self.close()
            log = self._settings.logs / f"{self.name}-{workload.name}.log"
            server, self._target = launch.make(log)
            self._server = self._stack.enter_context(server)
            self._key = launch.key
            target = parse(self._target).target
            address = target.openai or target.endpoint
            await server.wait_ready(lambda: info_of(address, "", INFO_TIMEOUT_S, INFO_TIMEOUT_S))
        return await serving.open_runs(self._options(workload, prompt_form), self._stack)

    def _options(self, workload: PeerWorkload, prompt_form: str) -> Options:
        return parse(
            [
                *(*self._target, *workload.flags()),
                *("--tokenizer", str(self._settings.directory_of(workload.model))),
                *("--prompt-form", prompt_form),
                *("--warmup-runs", str(self._settings.warmup_runs)),
                *("--repeat-runs", str(self._settings.repeat_runs)),
            ]
        )

    def pause(self) -> None:
        """Stop the server's processes with SIGSTOP."""
        if self._server is not None:
            self._server.pause()

    def resume(self) -> None:
        """End a pause."""
        if self._server is not None:
            self._server.resume()

    async def close(self) -> None:
        """Stop the server."""
        self._key = self._server = None
        await self._stack.aclose()


def _own_launch(weights: Weights, settings: Settings) -> Callable[[PeerWorkload], _Launch]:
    def launch(workload: PeerWorkload) -> _Launch:
        if weights == "bf16":
            directory = settings.directory_of(workload.model)
            flags = ["--model", str(directory), "--dtype", "bfloat16"]
        else:
            flags = ["--model", str(gguf_file(workload.model, weights))]
        flags += settings.own_flags
        return _Launch(flags, lambda log: _own_server(flags, settings.over, log))

    return launch


def _own_server(flags: list[str], over: str, log: Path) -> tuple[ServerProcess, list[str]]:
    config = parse(flags).target.config
    assert config is not None
    if over == "zmq":
        server = OwnServer(config, log)
        return server, ["--endpoint", server.endpoint]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    return OwnServer(config, log, http_port=port), ["--backend", "openai", "--base-url", url]


def _bench_model(workload: PeerWorkload, settings: Settings) -> str:
    """Return the model whose vocabulary bench.serving takes prompts from."""
    if workload.model == "gemma3":
        return FILE_MODEL
    return str(settings.directory_of(workload.model))


def _peer_launch(
    peer: Peer, weights: Weights, settings: Settings
) -> Callable[[PeerWorkload], _Launch]:
    if weights not in peer.weights:
        raise ConfigError(
            f"{peer.name} does not serve {weights} weights, only {', '.join(peer.weights)}"
        )
    program = peer.install()

    def command_of(port: int, workload: PeerWorkload) -> list[str]:
        return [*peer.command(Start(program, port, workload, weights)), *settings.peer_flags]

    def launch(workload: PeerWorkload) -> _Launch:
        def make(log: Path) -> tuple[ServerProcess, list[str]]:
            port = free_port()
            command = command_of(port, workload)
            model = _bench_model(workload, settings)
            server = ServerProcess(command, log, READY_TIMEOUT_S, peer.environment)
            return server, peer.target(port, model)

        return _Launch(command_of(0, workload), make)

    return launch


Figure = Callable[[Summary], float | None]
# Title, digits after the point, and the figure of a run.
FIGURES: list[tuple[str, int, Figure]] = [
    ("tok/s", 0, lambda s: s.throughput),
    ("TTFT p50 ms", 0, lambda s: s.ttft.p50 if s.ttft else None),
    ("TTFT p99 ms", 0, lambda s: s.ttft.p99 if s.ttft else None),
    ("TPOT p50 ms", 1, lambda s: s.tpot.p50 if s.tpot else None),
]


def append(path: Path, outcome: Outcome) -> None:
    """Append an outcome to a file, as a line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(dataclasses.asdict(outcome)) + b"\n")


def read(path: Path) -> list[Outcome]:
    """Return the outcomes of a file, or raise ConfigError."""
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Outcome) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no results: {error}") from None


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row per outcome.

    Each cell has the medians of ours and theirs, and the median of the ratios of neighbouring runs
    with the lowest and the highest ratio.
    """
    rows = []
    for outcome in sorted(outcomes, key=lambda o: (o.workload, o.weights, o.peer)):
        cells = [_cell(outcome, places, figure) for _, places, figure in FIGURES]
        rows.append([outcome.workload, outcome.peer, outcome.weights, *cells])
    titles = [title for title, _, _ in FIGURES]
    return markdown_table(["workload", "peer", "weights", *titles], rows)


def _cell(outcome: Outcome, places: int, figure: Figure) -> str:
    pairs = [(figure(o), figure(t)) for o, t in zip(outcome.ours, outcome.theirs, strict=True)]
    complete = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
    if not complete:
        return "n/a"
    ratios = [ours / theirs for ours, theirs in complete]
    ours, theirs = (statistics.median(pair[side] for pair in complete) for side in (0, 1))
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    return f"{ours:.{places}f} / {theirs:.{places}f} = {middle:.2f} x ({low:.2f} to {high:.2f})"
