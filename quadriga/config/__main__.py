"""`python -m quadriga.config --markdown` prints docs/configuration.md."""

import argparse
import dataclasses
import re
from typing import Any

from quadriga.config.environment import READ_BY_LIBRARIES, READ_HERE, EnvironmentVariable
from quadriga.config.flags import flag_name, metavar
from quadriga.config.foreign_flags import FOREIGN_FLAGS
from quadriga.config.server_config import ServerConfig, help_text

HEADER = """\
# Configuration

<!-- Made by `python -m quadriga.config --markdown > docs/configuration.md`. Do not edit. -->

The flags of `quadriga serve` and `launcher.py`. `--help` shows those in bold, `--help-all` all of \
them.

`--config server.yaml` reads flags from a file: `max-batch-size: 32`, one per line, without the \
dashes; a list stands for comma-separated items. The command line takes precedence. A key that is \
no flag is an error that names similar flags.

`quadriga serve MODEL` is short for `--model MODEL`. For a flag of vLLM, SGLang or llama.cpp the \
error names the flag here.
"""


def markdown() -> str:
    """Return the page of all flags."""
    tables = [_table(group) for group in ServerConfig().groups()]
    environment = [
        "## Environment variables\n",
        _variables("The project reads:", READ_HERE),
        _variables("Libraries read, with an effect on a server:", READ_BY_LIBRARIES),
    ]
    return "\n".join([HEADER, *tables, _other_servers(), *environment])


def _other_servers() -> str:
    rows = [
        f"| {foreign.servers} | `{name}` | {_as_code(foreign.here)} |"
        for name, foreign in FOREIGN_FLAGS.items()
    ]
    head = ["## Flags of other servers\n", "| server | flag | here |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _as_code(text: str) -> str:
    """Return the text with its flags marked as code."""
    return re.sub(r"--[a-z-]+", lambda match: f"`{match[0]}`", text)


def _variables(title: str, variables: tuple[EnvironmentVariable, ...]) -> str:
    rows = [f"| `{v.name}` | {v.default} | {v.meaning} |" for v in variables]
    head = [f"{title}\n", "| variable | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _table(group: Any) -> str:
    title = (group.__doc__ or "").rstrip(".")
    rows = [_row(field) for field in dataclasses.fields(group)]
    head = [f"## {title}\n", "| flag | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _row(field: "dataclasses.Field[Any]") -> str:
    names = [field.name]
    if field.metadata["alias"] and not field.metadata["alias_value"]:
        names.append(field.metadata["alias"])
    value = "" if field.type is bool or field.metadata["choices"] else f" {metavar(field)}"
    flags = ", ".join(f"`{flag_name(name)}{value}`" for name in names)
    flags = f"**{flags}**" if field.metadata["basic"] else flags
    default = "" if field.default in (None, "", False) else f"`{field.default}`"
    text = help_text(field)
    if field.metadata["choices"]:
        text += f". One of {', '.join(f'`{choice}`' for choice in field.metadata['choices'])}"
    return f"| {flags} | {default} | {text} |"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser("python -m quadriga.config")
    parser.add_argument("--markdown", action="store_true", required=True, help="print the page")
    parser.parse_args()
    print(markdown(), end="")


if __name__ == "__main__":
    main()
