"""Where replicas on other machines give KV pages: a file that the crew keeps for its worker.

The driver of a cluster says it to every crew, whenever a replica joins or is lost. A worker that is
restarted finds the file, and reads it again when it has changed.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from quadriga.disk import FileStamp, file_stamp, read_text

FILE_NAME = "page-sources"


def format_sources(addresses: Mapping[int, str]) -> str:
    """Return addresses by the numbers of their replicas as a text: `0=tcp://… 2=tcp://…`."""
    return " ".join(f"{number}={address}" for number, address in sorted(addresses.items()))


def write_sources(run_dir: Path, text: str) -> None:
    """Write the file of a run. text: as of format_sources."""
    unfinished = run_dir / f"{FILE_NAME}.new"
    unfinished.write_text(text)
    os.rename(unfinished, run_dir / FILE_NAME)


class SourcesFile:
    """Keeps the file of a run for the worker, as the driver says.

    Args:
        run_dir: directory of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._number = 0

    def update(self, command: str) -> None:
        """Take in the argument of a command SOURCES, unless a later one has come before it.

        Args:
            command: its number, and the text of format_sources. Ray may change the order of
                commands.
        """
        number, _, text = command.partition(" ")
        if int(number) > self._number:
            self._number = int(number)
            write_sources(self._run_dir, text)


class PageSources:
    """Reads the file of a run.

    Args:
        run_dir: directory of the run.
        numbers: of the replicas to look for.
    """

    def __init__(self, run_dir: Path, numbers: tuple[int, ...]) -> None:
        self._path = str(run_dir / FILE_NAME)
        self._numbers = {str(number): number for number in numbers}
        self._stamp: FileStamp | None = None
        self._found: dict[int, str] = {}

    def find(self) -> Mapping[int, str]:
        """Return the addresses of the replicas that are there, by their numbers."""
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            words = "" if stamp is None else read_text(self._path)
            pairs = [word.split("=", 1) for word in words.split()]
            self._found = {self._numbers[n]: address for n, address in pairs if n in self._numbers}
            self._stamp = stamp
        return self._found
