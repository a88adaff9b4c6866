"""CPU time and memory of the server's processes: all descendants of the launcher."""

import time
from collections.abc import Iterable

import psutil

from quadriga.wire.messages.live import LiveProcess

MAX_PROCESSES = 64
LIST_INTERVAL_S = 5.0  # the list of processes costs more than their numbers


class ProcessUsage:
    """Read what the processes use.

    Args:
        launcher: process id of the launcher.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._processes: dict[psutil.Process, str] = {}
        self._listed_at = 0.0

    def read(self) -> list[LiveProcess]:
        """Return the usage of each process. It reads files, so that it should run in a thread."""
        now = time.monotonic()
        if now - self._listed_at >= LIST_INTERVAL_S:
            self._list(now)
        usage = list(self._usage())
        if len(usage) < len(self._processes):  # one has ended, and another may have its place
            self._list(now)
            usage = list(self._usage())
        return usage

    def _list(self, now: float) -> None:
        self._listed_at = now
        try:
            launcher = psutil.Process(self._launcher)
            found = [launcher, *launcher.children(recursive=True)][:MAX_PROCESSES]
        except psutil.Error:
            found = []
        self._processes = {process: self._name_of(process) for process in found}

    def _name_of(self, process: psutil.Process) -> str:
        if process.pid == self._launcher:
            return "launcher"
        try:
            return process_name(process.cmdline(), process.ppid() == self._launcher)
        except psutil.Error:
            return ""

    def _usage(self) -> Iterable[LiveProcess]:
        for process, name in self._processes.items():
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
                    started_at = process.create_time()
            except psutil.Error:
                continue
            cpu_seconds = times.user + times.system
            yield LiveProcess(name, process.pid, cpu_seconds, memory.rss, started_at)


def process_name(command: list[str], is_child: bool) -> str:
    """Return the name of a process.

    Args:
        command: its command line, in which the server's own have a word such as `http_proc`.
        is_child: it is a child of the launcher; a child of another process has a mark.
    """
    program = (command or ["?"])[0].rsplit("/", 1)[-1]
    name = next((word for word in command if word.endswith("_proc")), program)
    return name if is_child else f"{name} (child)"
