"""Find and start the programs: the launcher, the processes of a server, and the simulator.

A checkout has them beside this package, and the bench, too. A wheel has them in
`quadriga/_programs`, without the bench, so that no `launcher.py` in the user's directory takes the
place of the server's. Both run a module of them with

    python -m quadriga.programs MODULE …

Child processes run this file as a script, with which Python leaves the working directory out of
sys.path. Before `main`, it may import nothing but Python's own modules.
"""

import gc
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "_programs"
IS_CHECKOUT = not _IN_WHEEL.is_dir()
# Of the names of a server's processes.
_PROCESS_SUFFIX = "_proc"
PROGRAMS_DIR = _PACKAGE.parent if IS_CHECKOUT else _IN_WHEEL
_NO_BENCH = (
    "{module} is not part of an installed wheel, which has the server and its clients: clone the"
    " repository and run `pip install -e .` in it, or measure with another client of the server's"
    " OpenAI API, such as `vllm bench serve`"
)


def command_of(module: str) -> list[str]:
    """Return the command that runs a module of the programs in a process of its own."""
    return [sys.executable, str(Path(__file__).resolve()), module]


def load_function(module: str, name: str) -> Callable[[list[str]], int]:
    """Import the function of a command, and what it imports, from the programs.

    Exit with a message if this installation lacks the module.
    """
    _check_has(module)
    _search_programs_first()
    function: Callable[[list[str]], int] = getattr(import_module(module), name)
    return function


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation."""
    return f"pip install -e '.[{extra}]'" if IS_CHECKOUT else f"pip install 'quadriga[{extra}]'"


def main() -> None:
    """Run the module that the first argument names, with the further arguments."""
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python -m quadriga.programs MODULE [ARGUMENTS], as in: bench.compare --help"
        )
    if sys.path[0] == str(_PACKAGE):  # of a script: it would make quadriga/errors.py `errors`
        del sys.path[0]
    if sys.argv[1].endswith(_PROCESS_SUFFIX):
        gc.disable()  # imports leave little garbage; quadriga/server/processes/child.py enables it
    _check_has(sys.argv[1])
    _search_programs_first()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _check_has(module: str) -> None:
    """Exit for a module of the bench in a wheel, where the user's own `bench/` would be found."""
    if module.partition(".")[0] == "bench" and not IS_CHECKOUT:
        sys.exit(_NO_BENCH.format(module=module))


def _search_programs_first() -> None:
    if sys.path[0] != str(PROGRAMS_DIR):
        sys.path.insert(0, str(PROGRAMS_DIR))


if __name__ == "__main__":
    main()
