"""Run every measurement on a GPU, one after the other, and write a report.

    python -m bench.gpu.prepare gpu-files                  # before, where there is a network
    python -m bench.gpu.all gpu-files --out results        # all stages
    python -m bench.gpu.all gpu-files --first              # those that answer in ten minutes
    python -m bench.gpu.all gpu-files --device cpu         # every stage with tiny constants

Each stage is a process with a time limit of its own; a stage that fails or takes too long does not
end the others. After each, results.jsonl has a further line, and report.md is written again.
Exit codes: 0 all stages passed, 1 one failed or was stopped, 2 bad flags.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.report.table import markdown_table, table_of
from quadriga.errors import ConfigError
from quadriga.programs import PROGRAMS_DIR
from quadriga.server.processes.control_channel import signal_at_parents_death

FIRST_LIMIT_S = 600  # of the stages that answer first, together
KERNEL_TESTS = ("tests/unit/gpu/test_triton_kernels.py", "tests/unit/gpu/test_triton_sampling.py")
ENGINE_TESTS = (
    "tests/gpu",
    "tests/unit/gpu/test_triton_graphs.py",
    "tests/unit/gpu/test_triton_engine.py",
    "tests/unit/gpu/test_triton_experts.py",
    "tests/unit/gpu/test_kv_tiers.py",
)
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True, slots=True)
class Stage:
    """A command with a time limit.

    Attributes:
        name: of its log, and of its section in the report.
        command: what is run.
        limit_s: seconds after which it is stopped.
        is_first: it belongs to the stages that answer within ten minutes.
        gives_figures: the command takes `--json FILE`.
        missing: why it cannot run here; "": it can.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    is_first: bool = False
    gives_figures: bool = True
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where the stages run.

    Attributes:
        models: the directory of bench.gpu.prepare.
        device: cuda, or cpu: every stage with tiny constants and the model tiny.
    """

    models: Path
    device: str

    @property
    def is_tiny(self) -> bool:
        """Whether everything is small, for a machine without a GPU."""
        return self.device == "cpu"

    def model(self, name: str) -> list[str]:
        """Return the flags of a prepared model with random weights."""
        directory = self.models / ("tiny" if self.is_tiny else name)
        flags = ["--model", str(directory), "--load-format", "dummy", "--device", self.device]
        return [*flags, "--attention-backend", "torch"] if self.is_tiny else flags


# Flags of bench.serving; later flags win.
SERVE = "bench.serving --no-stop-on-eos"
WIDTH = f"{SERVE} --num-requests 256 --max-new-tokens 64 --max-batch-size 64"
WIDTH += " --prefill-max-batch-size 16"
STREAMS = f"{SERVE} --num-requests 256 --max-new-tokens 512 --max-batch-size 256"
PROMPTS = f"{SERVE} --num-requests 256 --max-new-tokens 1 --prompt-repeats 37 --unique-prompts"
PROMPTS += " --max-batch-size 16 --prefill-max-batch-size 16"
PACED = f"{SERVE} --num-requests 64 --max-new-tokens 128 --submit-interval-ms 20 --pretok"
PACED += " --submit-schedule absolute --max-batch-size 64 --stream-interval 8"
SCHEMAS = "bench.structured --report-only --num-schemas 8 --turns 4 --concurrency 1 64"
SCHEMAS += " --num-requests 16 256 --max-batch-size 64"
# What is added with --device cpu.
TINY_LOAD = "--num-requests 4 --max-new-tokens 4 --warmup-runs 1 --repeat-runs 1 --max-batch-size 4"
TINY_SCHEMAS = "--num-requests 2 4 --concurrency 1 4 --turns 2"
TINY_FLOOR = "--batches 1 2 --contexts 16 --steps 3 --ceiling-width 64"
TINY_PROFILE = "--batches 2 --context 16 --prompt 8 --steps 2"
TINY_PREFILL = "--shapes 1x8 2x16 1x4+32 --steps 2 --ceiling-width 64"
TINY_PEERS = "--load 8 4 2 4 --warmup-runs 0 --repeat-runs 1"


def stages_of(setup: Setup) -> list[Stage]:
    """Return all stages; those that answer first come first."""
    tiny = setup.is_tiny

    def run(
        name: str, limit_s: int, command: str, tiny_flags: str, model: str = "", missing: str = ""
    ) -> Stage:
        module, *flags = command.split()
        flags += setup.model(model) if model else ["--device", setup.device]
        flags += tiny_flags.split() if tiny else []
        return Stage(name, _module(module, *flags), limit_s, missing=missing)

    def tests(name: str, limit_s: int, paths: Sequence[str], expression: str) -> Stage:
        return Stage(name, _pytest(paths, expression if tiny else ""), limit_s, gives_figures=False)

    floor, profile = "bench.gpu.decode_floor", "bench.gpu.profile"
    drawn = f"{WIDTH} --warmup-runs 1 --temperature 0.8 --top-p 0.9"
    no_flashinfer = "FlashInfer needs a GPU" if tiny else ""
    peers = f"bench.peers --model {setup.models / ('tiny' if tiny else 'gpt2')}"
    first = [
        run("ceilings", 70, "bench.gpu.ceilings", "--width 256 --bytes 1048576"),
        tests("kernel-tests", 110, KERNEL_TESTS, "activations"),
        tests("engine-tests", 150, ENGINE_TESTS, "sizes"),
        Stage(
            "memcheck",
            (SANITIZER, "--tool", "memcheck", *_pytest(KERNEL_TESTS[:1], "decode_rows or pages")),
            60,
            gives_figures=False,
            missing=""
            if shutil.which(SANITIZER)
            else f"{SANITIZER} of the CUDA toolkit is not on the PATH",
        ),
        run("floor", 70, floor, TINY_FLOOR, "gpt2"),
        run("width", 70, f"{WIDTH} --warmup-runs 2 --repeat-runs 3", TINY_LOAD, "gpt2"),
        run("streams", 70, f"{STREAMS} --warmup-runs 1", TINY_LOAD, "gpt2"),
    ]
    return [
        *(replace(stage, is_first=True) for stage in first),
        run("width-top-p", 90, drawn, TINY_LOAD, "gpt2"),
        run("schemas", 90, SCHEMAS, TINY_SCHEMAS, "gpt2"),
        run("schemas-8b", 180, SCHEMAS, TINY_SCHEMAS, "llama8b"),
        run("products", 240, "bench.gpu.products", "--tiny"),
        run("tiers", 60, "bench.gpu.tiers --megabytes 512", "--megabytes 4", "gpt2"),
        run("profile", 120, profile, TINY_PROFILE, "gpt2"),
        run("profile-8b", 120, profile, TINY_PROFILE, "llama8b"),
        run("prefill", 120, "bench.gpu.prefill", TINY_PREFILL, "llama8b"),
        run("prefill-load", 90, f"{PROMPTS} --warmup-runs 1", TINY_LOAD, "gpt2"),
        run("paced", 90, f"{PACED} --warmup-runs 1", TINY_LOAD, "gpt2"),
        run("floor-1b", 120, floor, TINY_FLOOR, "llama1b"),
        run("floor-8b", 180, floor, TINY_FLOOR, "llama8b"),
        # Its kernels are compiled in a minute or two.
        run("floor-flashinfer", 400, f"{floor} --attention-backend flashinfer", TINY_FLOOR,
            "llama8b", no_flashinfer),
        replace(run("peers", 600, peers, TINY_PEERS), gives_figures=False),
    ]  # fmt: skip


def _module(name: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *flags)


def _pytest(paths: Sequence[str], expression: str) -> tuple[str, ...]:
    flags = ["-k", expression] if expression else []
    return (*_module("pytest", "-q", "-p", "no:cacheprovider", "-n0"), *flags, *paths)


NUM_LOG_LINES = 25


class StageOutcome(Enum):
    """How a stage ended; the value is its name in the report."""

    PASSED = "passed"
    FAILED = "failed"
    STOPPED = "stopped at its limit"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class StageResult:
    """A stage that has ended.

    Attributes:
        log: its output.
        figures: what it wrote as JSON, an object for each row or run.
    """

    stage: Stage
    outcome: StageOutcome
    seconds: float
    log: Path
    figures: list[dict[str, Any]]


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file: JSON lines, or one object; none if it was not written.

    The last line of a stage that was stopped may be incomplete, and is left out.
    """
    if not path.is_file():
        return []
    text, figures = path.read_text(), []
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        for line in text.splitlines():
            with suppress(json.JSONDecodeError):
                figures.append(json.loads(line))
    return figures


def append_line(path: Path, result: StageResult) -> None:
    """Append a stage to a file, as a line of JSON."""
    line = {
        "stage": result.stage.name,
        "outcome": result.outcome.value,
        "seconds": round(result.seconds, 1),
        "command": shlex.join(result.stage.command),
        "missing": result.stage.missing,
        "figures": result.figures,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def write_report(path: Path, results: Sequence[StageResult], device: str) -> None:
    """Write all stages so far: how they ended, and a section for each."""
    rows = [
        [result.stage.name, result.outcome.value, f"{result.seconds:.0f}"] for result in results
    ]
    head = f"# Measurements on {device}, {time.strftime('%Y-%m-%d %H:%M %Z')}"
    parts = [head, markdown_table(["stage", "outcome", "seconds"], rows)]
    parts += [_section(result) for result in results]
    path.write_text("\n\n".join(parts) + "\n")


def _section(result: StageResult) -> str:
    parts = [f"## {result.stage.name}", f"    {shlex.join(result.stage.command)}"]
    tables = [row for row in result.figures if "table" in row]
    if result.outcome is StageOutcome.PASSED and tables:
        for title, rows in groupby(tables, lambda row: row["table"]):
            shown = [{key: row[key] for key in row if key != "table"} for row in rows]
            parts += [str(title), table_of(shown)]
    else:
        last = result.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        parts.append("\n".join(["```", *last, "```"]))
    return "\n\n".join(parts)


STOP_TIMEOUT_S = 20.0  # from SIGTERM to SIGKILL: a load stops the server that it started


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages of a command line, and return the exit code."""
    parser = command_parser("bench.gpu.all", __doc__)
    parser.add_argument("models", type=Path, help="the directory of bench.gpu.prepare")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny constants (default: cuda)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-results"),
        metavar="DIRECTORY",
        help="report.md, results.jsonl and logs (default: gpu-results)",
    )
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="run only these stages")
    parser.add_argument(
        "--first", action="store_true", help="run only the stages that answer in ten minutes"
    )
    parser.add_argument("--list", action="store_true", help="print the stages, run nothing")
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.all", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    setup = Setup(arguments.models.absolute(), arguments.device)
    stages = chosen(stages_of(setup), arguments.only, arguments.first)
    if arguments.list:
        for stage in stages:
            print(
                f"{stage.name:<18}{stage.limit_s:>5} s  {stage.missing or ' '.join(stage.command)}"
            )
        return EXIT_OK
    if not (setup.models / "tiny" / "config.json").is_file():
        raise ConfigError(
            f"{arguments.models} has no models: write them by `python -m bench.gpu.prepare"
            f" {arguments.models}`"
        )
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.jsonl").unlink(missing_ok=True)
    results: list[StageResult] = []
    for stage in stages:
        print(f"{time.strftime('%H:%M:%S')} {stage.name}, at most {stage.limit_s} s", flush=True)
        results.append(run_stage(stage, out))
        print(f"         {results[-1].outcome.value} in {results[-1].seconds:.0f} s", flush=True)
        append_line(out / "results.jsonl", results[-1])
        write_report(out / "report.md", results, setup.device)
    print(f"{out / 'report.md'}")
    bad = any(result.outcome in (StageOutcome.FAILED, StageOutcome.STOPPED) for result in results)
    return EXIT_FAILED if bad else EXIT_OK


def chosen(stages: Sequence[Stage], names: Sequence[str] | None, is_first: bool) -> list[Stage]:
    """Return the stages of a command line, or raise ConfigError for a name that is none."""
    known = [stage.name for stage in stages]
    if unknown := set(names or ()) - set(known):
        raise ConfigError(
            f"--only {', '.join(sorted(unknown))} is no stage: the stages are {', '.join(known)}"
        )
    return [
        stage
        for stage in stages
        if (not names or stage.name in names) and (stage.is_first or not is_first)
    ]


def run_stage(stage: Stage, out: Path) -> StageResult:
    """Run a stage, whose output goes to a log, and return what came of it."""
    log, figures = out / f"{stage.name}.log", out / f"{stage.name}.json"
    figures.unlink(missing_ok=True)
    if stage.missing:
        log.write_text(f"not run: {stage.missing}\n")
        return StageResult(stage, StageOutcome.NOT_RUN, 0.0, log, [])
    command = [*stage.command, *(["--json", str(figures)] if stage.gives_figures else [])]
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=PROGRAMS_DIR,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(signal_at_parents_death, signal.SIGTERM),
        )
        outcome = _wait(process, stage.limit_s)
    return StageResult(stage, outcome, time.monotonic() - began, log, read_figures(figures))


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> StageOutcome:
    """Wait for a process, and stop it with all its children if it takes too long."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        stop_group(process)
        return StageOutcome.STOPPED
    except BaseException:
        stop_group(process)
        raise
    return StageOutcome.PASSED if code == 0 else StageOutcome.FAILED


def stop_group(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and its group: by SIGTERM, and by SIGKILL what is left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
