"""Install the peers into virtual environments of their own, in the cache."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from quadriga.errors import ConfigError
from quadriga.model_files.cache import cache_directory

# The local version selects the CPU build, as plain torch brings gigabytes of CUDA libraries. If
# pip's index has no such build, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
CPU_TORCH = "torch==2.13.0+cpu"


def home_of(name: str) -> Path:
    """Return the directory of a peer."""
    return cache_directory() / "peers" / name


def environment(name: str, requirements: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """Return the python of a peer's environment; install it at the first call, in minutes.

    `unwanted` packages are uninstalled afterwards. Raises ConfigError with the end of pip's output.
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
    """Run a command of an installation, or raise ConfigError with the end of its output."""
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
