"""The command line of a server: its flags, MODEL, and advice for flags that do not exist."""

import argparse
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

from quadriga import __version__, errors, keywords
from quadriga.server.config import server_config
from quadriga.server.config.flags import flag_fields, flag_name, missing_flag_advice
from quadriga.server.config.server_config import ServerConfig

# Flags that mean the same in other commands, or in other programs.
SYNONYMS = {
    "--url": "--endpoint",
    "--base-url": "--endpoint",
    "--endpoint": "--url",
    "--key": "--api-key",
    "--token": "--api-key",
    "--n-predict": "--max-new-tokens",
    "--num-predict": "--max-new-tokens",
    "--temp": "--temperature",
}


class AdvisingParser(argparse.ArgumentParser):
    """A parser that names similar flags for one that it does not have."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the parsed arguments; an unknown one is an error."""
        found, others = self.parse_known_args(args, namespace)
        if others:
            self.error(advice_on(others, self))
        return found


def advice_on(others: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return what is wrong with arguments that a parser does not know, and flags near them."""
    flags = [word.partition("=")[0] for word in others if word.startswith("-")]
    known = _flags_of(parser)
    return "; ".join(_near(flag, known) for flag in flags) or f"unknown: {' '.join(others)}"


def _near(flag: str, known: Sequence[str]) -> str:
    words = {name.lstrip("-"): name for name in known}
    near = [words[word] for word in keywords.similar(flag.lstrip("-").replace("_", "-"), words)]
    if SYNONYMS.get(flag) in known:
        near.insert(0, SYNONYMS[flag])
    shown = f"near it: {', '.join(dict.fromkeys(near))}" if near else "--help shows the flags"
    return f"there is no flag {flag}; {shown}"


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long flags of a parser and of its subcommands."""
    flags: list[str] = []
    for action in parser._actions:
        flags += [name for name in action.option_strings if name.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                flags += _flags_of(subparser)
    return list(dict.fromkeys(flags))


class CommandParser(AdvisingParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise errors.ConfigError(f"{message}; --help shows all flags")


class ServerParser(argparse.ArgumentParser):
    """Parse the command line of `quadriga serve` or launcher.py.

    Args:
        program: name of the command.
    """

    def __init__(self, program: str) -> None:
        super().__init__(
            program,
            usage="%(prog)s [MODEL ...] [FLAGS]",
            description="Serve language models in four processes each. MODEL is short for --model.",
            epilog="--help-all shows the other flags; docs/configuration.md has a table of them.",
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=f"quadriga {__version__}")
        server_config.add_flags(self, repeatable=("model",))

    def parse_flags(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Return the flags, for `server_config.from_namespace`; each MODEL becomes a --model.

        For an unknown flag print usage and advice, and exit.

        Args:
            arguments: the command line without the program; None: that of this process.
        """
        namespace, others = self.parse_known_args(arguments)
        unknown = [word.partition("=")[0] for word in others if word.startswith("-")]
        if unknown:
            self.error("; ".join(map(_advice, unknown)))
        if others:
            named = server_config.named_models(namespace)
            namespace.model = list(dict.fromkeys([*others, *named]))
        return namespace


def in_flags(message: str) -> str:
    """Return a message with flags in place of the fields that it names, as Python calls them.

    A field of one word counts only where its value follows, as in "dp is 1": such words are also
    English. A key of a YAML file, which follows the file's name, stays as it is.
    """
    return _field_names().sub(lambda found: flag_name(found[0]), message)


@cache
def _field_names() -> "re.Pattern[str]":
    names = sorted(field.name for field in flag_fields(*ServerConfig().groups()))
    several, one = (
        "|".join(name for name in names if ("_" in name) is has_several)
        for has_several in (True, False)
    )
    in_text = rf"""(?<![\w'"./:=-])(?<!\.yaml: )(?<!\.yml: )(?:{several})(?![\w'"./=-])"""
    with_value = rf"(?:^|(?<=\band ))(?:{one})(?= is )"
    return re.compile(f"{in_text}|{with_value}")


def _advice(flag: str) -> str:
    """Return what to type instead of an unknown flag."""
    if (advice := missing_flag_advice(flag)) is not None:
        return advice
    fields = flag_fields(*ServerConfig().groups())
    names = [field.name for field in fields]
    names += [field.metadata["alias"] for field in fields if field.metadata["alias"]]
    word = flag.lstrip("-").replace("-", "_")
    if near := keywords.similar(word, names):
        return f"there is no flag {flag}; near it: {', '.join(map(flag_name, near))}"
    return f"there is no flag {flag}; --help-all shows all flags"
