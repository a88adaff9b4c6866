"""Measure the start of a server: `python -m bench.start [--checkout DIR]`.

Starts servers one after the other, each until it has answered a first request with one token. With
`--checkout`, those of another checkout of this project take turns with this one's. The times to the
ready line and to the first token depend on what else the machine does; the CPU time of the
processes hardly does.
"""

import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from bench.cli.command import command_parser
from bench.client.server import LAUNCHER, OwnServer, free_port
from bench.report.table import markdown_table
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


def rows_of(starts: list[StartTimes]) -> dict[str, float]:
    """Return the medians of some starts, by what was measured."""
    rows = {
        "to the ready line": median(start.ready for start in starts),
        "to the first token": median(start.first_token for start in starts),
        "CPU of all processes": median(sum(start.cpu.values()) for start in starts),
    }
    rows |= {
        f"CPU of {name}": median(start.cpu[name] for start in starts) for name in starts[0].cpu
    }
    return rows | {
        name: median(start.phases.get(name, 0.0) for start in starts) for name in starts[0].phases
    }


def main() -> None:
    """Measure starts in turns, and print a table of medians in ms."""
    parser = command_parser("bench.start", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkout", type=Path, help="directory of another one, measured in turns")
    arguments = parser.parse_args()
    config = ServerConfig().replace(model=arguments.model, log_level="debug")
    launchers = {"this": LAUNCHER}
    if arguments.checkout is not None:
        launchers = {"other": arguments.checkout.resolve() / LAUNCHER.name, **launchers}
    missing = [str(launcher) for launcher in launchers.values() if not launcher.is_file()]
    if missing:
        sys.exit(f"error: there is no {missing[0]}; --checkout takes the directory of a checkout")
    starts: dict[str, list[StartTimes]] = {name: [] for name in launchers}
    for launcher in launchers.values():
        measure(launcher, config)  # the first start compiles kernels and Python files
    for _ in range(arguments.rounds):
        for name, launcher in launchers.items():
            starts[name].append(measure(launcher, config))
    columns = {name: rows_of(found) for name, found in starts.items()}
    names = dict.fromkeys(row for column in columns.values() for row in column)
    table = [
        [name, *(f"{1000 * c.get(name, 0.0):.0f}" for c in columns.values())] for name in names
    ]
    print(markdown_table([f"ms, median of {arguments.rounds}", *columns], table))


if __name__ == "__main__":
    main()
