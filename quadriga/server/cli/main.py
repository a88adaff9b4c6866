"""The command line: `quadriga serve`, `chat`, `ask`, `models`, `top` and the other COMMANDS.

A command's module is imported when it is chosen. `serve`, `bench` and `replay` are programs beside
this package, which `quadriga/programs.py` finds, and read their flags themselves.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from quadriga import __version__, errors, keywords, programs
from quadriga.server.config.parser import advice_on

# Shells report these exit codes for a program that SIGINT or SIGPIPE ended.
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 130, 141
DESCRIPTION = "Serve language models in four processes, and talk to them."


class ProgramCommand(NamedTuple):
    """A command that reads its flags itself: `function` of `module` takes them."""

    module: str
    function: str
    help: str


class Subcommand(NamedTuple):
    """A command of this package.

    Attributes:
        module: module of this folder.
        add_flags: function of it that adds the flags to a parser.
        run: function of it that takes the parsed flags.
    """

    module: str
    help: str
    add_flags: str = "add_flags"
    run: str = "run"


PROGRAMS = {
    "serve": ProgramCommand(
        "launcher", "serve", "start a server: quadriga serve --help lists its flags"
    ),
    "bench": ProgramCommand(
        "bench.serving", "main",
        "measure a server, any OpenAI-compatible one too: quadriga bench --help",
    ),
    "replay": ProgramCommand(
        "scheduler_proc.journal.replay", "main",
        "compute a request of a journal again, and compare: quadriga replay --help",
    ),
}  # fmt: skip
COMMANDS = {
    "chat": Subcommand("chat", "chat with a running server, in many turns"),
    "ask": Subcommand(
        "chat", "ask a running server, and print the answer as it comes", "add_ask_flags", "run_ask"
    ),
    "embed": Subcommand("embed", "write the vectors of a file of texts; see docs/embeddings.md"),
    "batch": Subcommand("batch", "run a file of requests on a server; see docs/batches.md"),
    "trace": Subcommand(
        "trace", "the trace of a request, or of all steps; see docs/monitor.md"
    ),
    "models": Subcommand(
        "models",
        "list the models of this machine; models check MODEL: whether a server can serve one",
    ),
    "top": Subcommand("top", "show what a server does now: requests, lanes, gauges and processes"),
    "keygen": Subcommand(
        "keys", "make keys for a server and for its clients; see docs/security.md",
        "add_keygen_flags", "run_keygen",
    ),
    "keys": Subcommand("keys", "make, list and remove API keys of tenants; see docs/keys.md"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if arguments[0] in PROGRAMS:
        program = PROGRAMS[arguments[0]]
        return programs.load_function(program.module, program.function)(arguments[1:])
    _check_command(arguments[0])
    try:
        namespace, others = _parser(arguments[0]).parse_known_args(arguments)
        if others:
            namespace.parser.error(advice_on(others, namespace.parser))
        namespace.run(namespace)
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left, as after `quadriga ask ... | head`
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except errors.QuadrigaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        _discard_stdout()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def _check_command(word: str) -> None:
    """Exit with usage, and the command that was meant, unless this is a command or a flag."""
    names = [*PROGRAMS, *COMMANDS]
    if word in names or word.startswith("-"):
        return
    near = keywords.similar(word, names)
    remedy = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(names)}"
    _parser().error(f"there is no command {word}; {remedy}")


def _discard_stdout() -> None:
    """Send unwritten output to /dev/null, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(chosen: str = "") -> argparse.ArgumentParser:
    """Return the parser of all commands, with the flags of the chosen one."""
    parser = argparse.ArgumentParser("quadriga", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"quadriga {__version__}")
    parsers = parser.add_subparsers(title="commands", required=True)
    for name, program in PROGRAMS.items():
        parsers.add_parser(name, help=program.help)
    for name, command in COMMANDS.items():
        its_parser = parsers.add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False
        )
        if name == chosen:
            module = import_module(f"quadriga.server.cli.{command.module}")
            getattr(module, command.add_flags)(its_parser)
            its_parser.set_defaults(run=getattr(module, command.run), parser=its_parser)
    return parser
