"""The command line: `quadriga serve`, `quadriga chat`, `quadriga ask`, `quadriga bench`."""

import argparse
import os
import sys
from collections.abc import Sequence

from quadriga.cli import ask, chat, keygen

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREAD = 1, 130, 141
"""The last two as shells say of who was ended by SIGINT or SIGPIPE, which Windows does not have."""
DESCRIPTION = "Serve language models in four processes, and talk to them."
BESIDE = """\
serving
  serve    start a server: quadriga serve --help lists its flags
measuring
  bench    measure a server, any OpenAI-compatible one too: quadriga bench --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. `serve` and `bench` take the flags of launcher.py and
    bench.serving."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        import launcher

        launcher.main(arguments[1:], "quadriga serve")
    if arguments[:1] == ["bench"]:
        from bench import serving

        return serving.main(arguments[1:])
    try:
        namespace = _parser().parse_args(arguments)
        code: int = namespace.run(namespace)
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # nobody reads any more, as after `quadriga ask ... | head`
        _leave_the_rest_unwritten()
        return EXIT_UNREAD
    except OSError as error:
        _leave_the_rest_unwritten()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return code


def _leave_the_rest_unwritten() -> None:
    """Python writes out what is left when it ends; that must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "quadriga",
        description=DESCRIPTION,
        epilog=BESIDE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        title="talking to a server", metavar="{serve,chat,ask,bench,keygen}", required=True
    )
    for module in (chat, ask, keygen):
        command = commands.add_parser(
            module.NAME, help=module.HELP, description=module.HELP, allow_abbrev=False
        )
        module.add_flags(command)
        command.set_defaults(run=module.run)
    return parser
