"""Measure the start of a server: `python -m bench.start ["NAME: FLAGS" ...] [-- FLAGS]`.

Starts servers one after the other, each until it has answered a first request with one token.
Variants, written as in bench.compare, take turns: `"old: @../before" "new: "` compares another
checkout. The times to the ready line and to the first token depend on what else the machine does;
the CPU time of the processes hardly does.
"""

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.cli.command import EXIT_OK, command_parser, run_command
from bench.client.server import OwnServer, free_port
from bench.turns import VARIANTS_HELP, Column, Turns, split_common, variant_of
from quadriga.client import Client
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.server_config import ServerConfig

ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0, ignore_eos=True)
START_TIMEOUT_S = 600.0
PHASES = re.compile(r"  (?:launcher|\w+_proc): (.*)")
PHASE = re.compile(r"([a-zA-Z ]+?) ([\d.]+) s")
READY = re.compile(r"quadriga ready in ([\d.]+) s")


class StartTimes(NamedTuple):
    """Seconds of one start.

    Attributes:
        ready: until the launcher's line, from the launcher's own begin.
        first_token: until the first token, from the call that starts the launcher.
        cpu: CPU seconds of each process until then.
        phases: of the phases that the processes report.
    """

    ready: float
    first_token: float
    cpu: dict[str, float]
    phases: dict[str, float]


def measure(launcher: Path, config: ServerConfig) -> StartTimes:
    """Start a server, ask it for a token, and stop it."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        began_at = time.monotonic()
        with (
            OwnServer(config, log, launcher, free_port()) as server,
            Client(server.endpoint, connect_timeout=START_TIMEOUT_S) as client,
        ):
            client.generate("The quick brown fox", ONE_TOKEN, timeout=START_TIMEOUT_S)
            first_token = time.monotonic() - began_at
            cpu = cpu_by_name(client.info()["pids"]["launcher"])
            while not (ready := READY.search(log.read_text())):
                server.check()
                time.sleep(0.01)
        return StartTimes(float(ready[1]), first_token, cpu, phases_of(log.read_text()))


def cpu_by_name(launcher_pid: int) -> dict[str, float]:
    """Return the CPU seconds of the launcher and its children so far."""
    launcher = psutil.Process(launcher_pid)
    seconds = {"launcher": sum(launcher.cpu_times()[:2])}
    for child in launcher.children():
        name = next((word for word in child.cmdline() if word.endswith("_proc")), child.name())
        seconds[name] = sum(child.cpu_times()[:2])
    return seconds


def phases_of(log: str) -> dict[str, float]:
    """Return the phases in the log of a server with `--log-level debug`."""
    phases: dict[str, float] = {}
    for line in log.splitlines():
        if found := PHASES.search(line):
            phases |= {what.strip(): float(seconds) for what, seconds in PHASE.findall(found[1])}
    return phases


def columns_of(first: StartTimes) -> list[Column[StartTimes]]:
    """Return what is shown, in ms: times, CPU time, and the processes and phases of a start."""
    columns: list[Column[StartTimes]] = [
        Column("to the ready line", lambda start: 1000 * start.ready),
        Column("to the first token", lambda start: 1000 * start.first_token),
        Column("CPU of all processes", lambda start: 1000 * sum(start.cpu.values()), 0, True),
    ]

    def of(title: str, part: str, name: str) -> Column[StartTimes]:
        return Column(title, lambda start: 1000 * getattr(start, part).get(name, 0.0))

    columns += [of(f"CPU of {name}", "cpu", name) for name in first.cpu]
    return columns + [of(name, "phases", name) for name in first.phases]


def main() -> int:
    """Measure starts in turns, print a table of medians in ms, and return the exit code."""
    parser = command_parser("bench.start", __doc__)
    parser.add_argument("variants", nargs="*", default=["this: "], help=VARIANTS_HELP)
    parser.add_argument("--turns", type=int, default=5, help="of each variant (default: 5)")
    own, common = split_common(sys.argv[1:])
    arguments = parser.parse_args(own)

    def work() -> int:
        variants = {variant.name: variant for variant in map(variant_of, arguments.variants)}
        configs = {
            name: variant.config([*common, "--log-level", "debug"])
            for name, variant in variants.items()
        }
        for name, variant in variants.items():
            measure(variant.launcher, configs[name])  # compiles kernels and Python files
        turns: Turns[StartTimes] = Turns(list(variants))
        for _, name in turns.order(arguments.turns):
            turns.results[name].append(measure(variants[name].launcher, configs[name]))
        first = next(iter(turns.results.values()))[0]
        print(turns.table(columns_of(first), f"ms, median of {arguments.turns}"))
        return EXIT_OK

    return run_command("bench.start", work)


if __name__ == "__main__":
    sys.exit(main())
