"""The docs agree with the code: defaults, endpoints, fields and flags of other servers."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import pytest

from http_proc.server import document
from quadriga.server.config.flags import FOREIGN_FLAGS, flag_fields, flag_name
from quadriga.server.config.server_config import ServerConfig
from tests.users_book import DOCS

PAGES = sorted(DOCS.rglob("*.md"))
UNITS = {"": 1, "s": 1, "ms": 1, "MiB": 1 << 20, "GiB": 1 << 30, "days": 86400, "tokens": 1}
AMOUNT = r"(?P<number>\d[\d,.]*\d|\d)(?: (?P<unit>ms|s|MiB|GiB|days|tokens))?"
# `--flag` (60 s), and 60 s (`--flag`).
DEFAULTS = (
    re.compile(rf"`(?P<flag>--[a-z-]+)` \({AMOUNT}(?:[;,)])"),
    re.compile(rf"(?<![\d-]){AMOUNT} \(`(?P<flag>--[a-z-]+)`\)"),
)


@cache
def defaults() -> dict[str, Any]:
    return {flag_name(field.name): field.default for field in flag_fields(*ServerConfig().groups())}


@cache
def openapi() -> dict[str, Any]:
    """Return the document that /openapi.json serves."""
    parsed: dict[str, Any] = json.loads(document())
    return parsed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_default_that_a_page_names_is_that_of_the_flag(page: Path) -> None:
    text = page.read_text()
    for match in (match for pattern in DEFAULTS for match in pattern.finditer(text)):
        default = defaults().get(match["flag"])
        if default is not None and not isinstance(default, str):
            amount = float(match["number"].replace(",", "")) * UNITS[match["unit"] or ""]
            assert amount == default, match[0]


def test_the_pages_name_defaults_at_all() -> None:
    found = [
        m for page in PAGES for pattern in DEFAULTS for m in pattern.finditer(page.read_text())
    ]
    assert len(found) > 12


def users_pages() -> str:
    return "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))


@pytest.mark.parametrize("path", openapi()["paths"])
def test_every_endpoint_has_a_place_in_the_users_book(path: str) -> None:
    shown = path.replace("{id}", "ID").replace("{name}", "NAME").replace("{item_id}", "ITEM")
    assert shown in users_pages()


def bodies() -> list[tuple[str, str]]:
    """Return path and name of the schema of every body in JSON."""
    found = []
    for path, operations in openapi()["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            if reference := schema.get("$ref"):
                found.append((path, reference.rpartition("/")[2]))
    return found


@pytest.mark.parametrize(("path", "schema"), bodies())
def test_every_field_of_a_request_has_a_place_in_the_users_book(path: str, schema: str) -> None:
    text = users_pages()
    fields = openapi()["components"]["schemas"][schema]["properties"]
    assert not [name for name in fields if not re.search(rf"[`\"{{, ]{re.escape(name)}\b", text)]


def users_page(name: str) -> str:
    return (DOCS / name).read_text()


def test_the_bytes_of_a_request_are_those_of_its_array() -> None:
    text = users_page("protocol.md")
    array = re.search(r"^`(\[\"generate\".*\])` is$", text, re.M)
    in_hex = re.search(r"^```\n(95 [0-9a-f ]+)\n```$", text, re.M)
    assert array
    assert in_hex
    assert msgpack.unpackb(bytes.fromhex(in_hex[1])) == json.loads(array[1])


def test_flags_of_other_servers_mean_what_the_error_says() -> None:
    rows = re.findall(r"^\| (`-.*?) \| (.*) \|$", users_page("coming-from.md"), re.M)
    compared = 0
    for theirs, ours in rows:
        for name in re.findall(r"`(--?[\w-]+)", theirs):
            here = FOREIGN_FLAGS[name].here if name in FOREIGN_FLAGS else ""
            if flag := re.match(r"--[a-z-]+", here):
                assert flag[0] in ours, f"{name} is {here}"
                compared += 1
    assert compared >= 20
