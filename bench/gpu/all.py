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
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from bench.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.gpu.prepare import ROOT
from bench.gpu.stages.report import (
    StageOutcome,
    StageResult,
    append_line,
    read_figures,
    write_report,
)
from bench.gpu.stages.stages import Setup, Stage, stages_of
from quadriga.errors import ConfigError
from quadriga.runtime.parent_death import signal_at_parents_death

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
            cwd=ROOT,
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
