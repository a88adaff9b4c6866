"""The command line: `quadriga serve`, `chat`, `ask`, `models`, `top` and the other COMMANDS.

`serve`, `bench` and `replay` are programs above this package, which `quadriga/programs.py` finds.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from quadriga import __version__
from quadriga.errors import QuadrigaError
from quadriga.keywords import similar
from quadriga.programs import load_function
from quadriga.server.cli import ask, batch, chat, keygen, keys, models, top, trace

# Shells report these exit codes for a program that SIGINT or SIGPIPE ended.
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 130, 141
PROGRAMS = {
    "serve": ("launcher", "serve"),
    "bench": ("bench.serving", "main"),
    "replay": ("scheduler_proc.journal.replay", "main"),
}
DESCRIPTION = "Serve language models in four processes, and talk to them."
HELP_OF_PROGRAMS = {
    "serve": "start a server: quadriga serve --help lists its flags",
    "bench": "measure a server, any OpenAI-compatible one too: quadriga bench --help",
    "replay": "compute a request of a journal again, and compare: quadriga replay --help",
}

COMMANDS = (chat, ask, batch, trace, models, top, keygen, keys)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    The PROGRAMS read their flags themselves.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if arguments[0] in PROGRAMS:
        return load_function(*PROGRAMS[arguments[0]])(arguments[1:])
    _check_command(arguments[0])
    try:
        namespace = _parser().parse_args(arguments)
        namespace.run(namespace)
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left, as after `quadriga ask ... | head`
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except QuadrigaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        _discard_stdout()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _check_command(word: str) -> None:
    """Exit with usage, and the command that was meant, unless this is a command or a flag."""
    names = [*HELP_OF_PROGRAMS, *(module.NAME for module in COMMANDS)]
    if word in names or word.startswith("-"):
        return
    near = similar(word, names)
    remedy = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(names)}"
    _parser().error(f"there is no command {word}; {remedy}")


def _discard_stdout() -> None:
    """Send unwritten output to /dev/null, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("quadriga", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"quadriga {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    for name, text in HELP_OF_PROGRAMS.items():
        commands.add_parser(name, help=text)
    for module in COMMANDS:
        command = commands.add_parser(
            module.NAME, help=module.HELP, description=module.HELP, allow_abbrev=False
        )
        module.add_flags(command)
        command.set_defaults(run=module.run)
    return parser
