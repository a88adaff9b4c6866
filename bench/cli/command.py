"""The frame of a command: its parser, signals, errors in one line, and exit codes."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from quadriga.errors import ConfigError, InvalidRequest, ModelError, QuadrigaError
from quadriga.server.config.parser import AdvisingParser, CommandParser

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NO_SERVER, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def command_parser(module: str, text: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """Return the parser of `python -m MODULE`, whose help shows `text` line by line."""
    return AdvisingParser(
        f"python -m {module}",
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def strict_parser(module: str, usage: str, text: str | None) -> CommandParser:
    """Return the parser of `python -m MODULE` that raises ConfigError and takes no abbreviations.

    Args:
        module: its name.
        usage: what follows the command in the first line of the help.
        text: shown line by line.
    """
    return CommandParser(
        f"python -m {module}",
        usage=f"%(prog)s {usage}",
        description=text,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def named_flags(variant: str) -> tuple[str, list[str]]:
    """Return the name and the flags of "NAME: FLAGS", or raise ConfigError."""
    name, colon, flags = variant.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f'{variant!r} is no variant: write "NAME: FLAGS"')
    return name.strip(), flags.split()


def run_command(name: str, work: Callable[[], int], on_failure: int = EXIT_NO_SERVER) -> int:
    """Run a command and return its exit code; an error is one line that begins with the name.

    `on_failure` is the exit code of an error that is neither a bad flag nor a missing model.
    """
    message: object
    try:
        return work()
    except (ConfigError, InvalidRequest, ModelError) as error:
        message, code = error, EXIT_USAGE
    except QuadrigaError as error:
        message, code = error, on_failure
    except (asyncio.CancelledError, KeyboardInterrupt):
        message, code = "interrupted", EXIT_INTERRUPTED
    print(f"{name}: {message}", file=sys.stderr)
    return code


def run_until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine, on uvloop if it is installed; a signal cancels it (CancelledError)."""

    async def cancel_on_signal() -> int:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        import uvloop
    except ImportError:
        return asyncio.run(cancel_on_signal())
    return uvloop.run(cancel_on_signal())
