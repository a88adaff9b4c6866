"""The files for Docker, systemd and the docs name flags and packages that exist."""

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

from quadriga.server.config import server_config as configuration
from quadriga.server.config.server_config import ServerConfig

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def parse(argv: list[str]) -> ServerConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    configuration.add_flags(parser)
    config = configuration.from_namespace(parser.parse_args(argv))
    config.validate()
    return config


def test_the_unit_of_systemd_starts_a_server_with_a_journal() -> None:
    line = re.search(r"^ExecStart=(.*)$", (ROOT / "deploy/quadriga.service").read_text(), re.M)
    assert line
    program, command, *flags = shlex.split(line.group(1))
    assert program.endswith("/quadriga")
    assert command == "serve"
    assert parse(flags).scheduler.resume


def test_the_container_starts_a_server_that_its_port_reaches() -> None:
    entry = re.search(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    command = re.search(r"^ *command: (.*)$", (ROOT / "compose.yaml").read_text(), re.M)
    assert entry
    assert command
    argv = [*ast.literal_eval(entry.group(1)), *ast.literal_eval(command.group(1))]
    assert argv[:2] == ["quadriga", "serve"]
    config = parse(argv[2:])
    assert config.http.host == "0.0.0.0"
    assert config.http.port == 8000


def test_the_container_is_built_from_every_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    builds = {path.name for path in ROOT.glob("*.py")} | {"pyproject.toml", "constraints.txt"}
    copied = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert packages | builds <= copied


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_docs_start_a_server_with_flags_that_exist(page: Path) -> None:
    parser = argparse.ArgumentParser()
    configuration.add_flags(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    known |= {"--config", "--help", "--help-all"}  # of the launcher itself
    # A command ends with its line, a backtick or a comment.
    commands = re.findall(r"(?:quadriga serve|launcher\.py) ([^`#\n]*)", page.read_text())
    flags = [flag for command in commands for flag in re.findall(r"(?<!\S)--[a-z-]+", command)]
    assert not [flag for flag in flags if flag not in known]
