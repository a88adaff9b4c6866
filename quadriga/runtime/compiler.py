"""Find the C++ compiler that makes the kernels of a CPU."""

import os
import shlex
import shutil

from quadriga.errors import ConfigError

COMPILER_VARIABLE = "CXX"


class NoCompiler(ConfigError):
    """The machine has no compiler, or it cannot compile the kernels."""


def find_compiler() -> list[str]:
    """Return the C++ compiler's command. Raise NoCompiler if there is none."""
    command_line = os.environ.get(COMPILER_VARIABLE)
    if command_line is not None:
        command = shlex.split(command_line)
        if not command or shutil.which(command[0]) is None:
            raise NoCompiler(
                f"{COMPILER_VARIABLE} is {command_line!r}, which is not a command here"
            )
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) is not None:
            return [name]
    raise NoCompiler("no C++ compiler is here (g++ or clang++)")
