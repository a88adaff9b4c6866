"""The file of the aliases that were moved, and the share of a canary."""

from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.server.model_aliases import Alias, AliasFile, read_aliases, write_aliases

ENDPOINTS = {"blue": "ipc://b", "prod": "ipc://b", "green": "ipc://g"}
MOVED = Alias(name="prod", model="green")


def test_the_endpoints_follow_the_file_and_a_canary_has_none(tmp_path: Path) -> None:
    path = tmp_path / "aliases.json"
    file = AliasFile(path)
    assert file.endpoints(ENDPOINTS) == ENDPOINTS
    write_aliases(path, [Alias(name="prod", model="blue", canary_model="green", canary=0.5)])
    assert file.endpoints(ENDPOINTS) == ENDPOINTS
    write_aliases(path, [MOVED, Alias(name="new", model="blue")])
    assert file.endpoints(ENDPOINTS) == ENDPOINTS | {"prod": "ipc://g", "new": "ipc://b"}
    assert read_aliases(path)[0] == MOVED


def test_a_broken_file_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "aliases.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no list of aliases"):
        read_aliases(path)


def test_the_share_of_a_canary_is_that_of_all_ids() -> None:
    alias = Alias(name="prod", model="blue", canary_model="green", canary=0.05)
    names = [alias.model_of(str(number)) for number in range(20_000)]
    assert abs(names.count("green") / len(names) - 0.05) < 0.005
    assert alias.model_of("r") == alias.model_of("r")
