"""Virtual environments of the peers, in the cache: none of them touches the project's own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.model_files.cache import cache_directory

CPU_TORCH = "torch==2.13.0+cpu"
"""By its local version, so that the CPU build is found or nothing: a plain torch brings gigabytes
of CUDA libraries. Where pip's index has no such build, PIP_EXTRA_INDEX_URL=
https://download.pytorch.org/whl/cpu gives it."""


def home_of(name: str) -> Path:
    """The directory of a peer."""
    return cache_directory() / "peers" / name


def environment(name: str, requirements: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """The python of the peer's environment, with the requirements installed; the first time, this
    takes minutes. unwanted: what they bring, and what is taken out again.

    ConfigError where pip fails, with the end of what it said.
    """
    home = home_of(name)
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(requirements)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print(f"installing {name} into {home}: {', '.join(requirements)}", file=sys.stderr)
        run([sys.executable, "-m", "venv", "--without-pip", str(home)])
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        run([*pip, "install", *requirements])
        if unwanted:
            run([*pip, "uninstall", "--yes", *unwanted])
        stamp.write_text(wanted)
    return python


def run(command: Sequence[str]) -> None:
    """Run a command of an installation. ConfigError with the end of its output if it fails."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        end = "\n".join(done.stdout.splitlines()[-15:])
        raise ConfigError(f"{' '.join(command)} failed:\n{end}")
