"""The command line of a server: its flags, MODEL, and advice for flags that do not exist."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from quadriga import __version__
from quadriga.errors import ConfigError
from quadriga.keywords import similar
from quadriga.server.config import server_config
from quadriga.server.config.flags import flag_fields, flag_name, missing_flag_advice
from quadriga.server.config.server_config import ServerConfig


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message}; --help shows all flags")


class ServerParser(argparse.ArgumentParser):
    """Parse the command line of `quadriga serve` or launcher.py.

    Args:
        program: name of the command.
    """

    def __init__(self, program: str) -> None:
        super().__init__(
            program,
            usage="%(prog)s [MODEL] [FLAGS]",
            description="Serve a language model in four processes. MODEL is short for --model.",
            epilog="--help-all shows the other flags; docs/configuration.md has a table of them.",
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=f"quadriga {__version__}")
        server_config.add_flags(self)

    def parse_flags(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Return the flags, for `server_config.from_namespace`; MODEL becomes --model.

        For an unknown flag or a second model print usage and advice, and exit.

        Args:
            arguments: the command line without the program; None: that of this process.
        """
        namespace, others = self.parse_known_args(arguments)
        unknown = [word.partition("=")[0] for word in others if word.startswith("-")]
        if unknown:
            self.error("; ".join(map(_advice, unknown)))
        if others:
            if len(others) > 1 or getattr(namespace, "model", others[0]) != others[0]:
                models = [*others, *filter(None, [getattr(namespace, "model", "")])]
                self.error(f"one server serves one model, but there are {', '.join(models)}")
            namespace.model = others[0]
        return namespace


def _advice(flag: str) -> str:
    """Return what to type instead of an unknown flag."""
    if (advice := missing_flag_advice(flag)) is not None:
        return advice
    fields = flag_fields(*ServerConfig().groups())
    names = [field.name for field in fields]
    names += [field.metadata["alias"] for field in fields if field.metadata["alias"]]
    word = flag.lstrip("-").replace("-", "_")
    if near := similar(word, names):
        return f"there is no flag {flag}; near it: {', '.join(map(flag_name, near))}"
    return f"there is no flag {flag}; --help-all shows all flags"
