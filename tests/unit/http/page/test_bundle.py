"""The bundle of the page: made of the sources beside it, small, and complete."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from http_proc.generation.sampling import CHAT
from http_proc.generation.schema import ChatRequest
from http_proc.page.pages import BUNDLE
from quadriga.sampling.params import GRAMMAR_FIELDS
from tests.server import ROOT

SOURCE = ROOT / "http_proc" / "page" / "source"
CHAT_SOURCE = SOURCE / "views" / "chat"
MAX_BYTES = 300_000
REBUILD = "npm ci --ignore-scripts && npm run build, in http_proc/page/source"


def manifest() -> dict[str, str | dict[str, str]]:
    found: dict[str, str | dict[str, str]] = json.loads((BUNDLE / "manifest.json").read_bytes())
    return found


def source_files() -> list[Path]:
    paths = [path for path in SOURCE.rglob("*") if path.is_file()]
    return sorted(path for path in paths if "node_modules" not in path.parts)


def test_the_bundle_is_made_of_the_sources() -> None:
    found = hashlib.sha256()
    for path in sorted(source_files(), key=lambda path: path.relative_to(SOURCE).as_posix()):
        found.update(path.relative_to(SOURCE).as_posix().encode() + b"\0")
        found.update(path.read_bytes() + b"\0")
    assert manifest()["sources"] == found.hexdigest(), REBUILD


def test_the_files_of_the_bundle_are_those_that_were_built() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in BUNDLE.iterdir()
             if path.name != "manifest.json"}  # fmt: skip
    assert manifest()["files"] == found, REBUILD


def test_the_files_that_a_page_loads_are_small() -> None:
    loaded = [path for path in BUNDLE.iterdir() if path.suffix in (".html", ".js", ".css", ".svg")]
    assert 0 < sum(path.stat().st_size for path in loaded) < MAX_BYTES


def test_the_page_has_no_script_or_style_of_its_own_and_loads_files_of_the_bundle_only() -> None:
    text = (BUNDLE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|style=", text)
    loaded = re.findall(r'(?:src|href)="ui/([^"]+)"', text)
    assert loaded
    assert all((BUNDLE / name).exists() for name in loaded)
    assert "://" not in text


def test_the_licence_of_each_package_is_part_of_the_bundle() -> None:
    package = json.loads((SOURCE / "package.json").read_bytes())
    text = (BUNDLE / "licences.txt").read_text()
    packages = package["dependencies"].items()
    assert not [name for name, version in packages if f"{name} {version} (" not in text]


def test_versions_are_pinned_without_addresses() -> None:
    package = json.loads((SOURCE / "package.json").read_bytes())
    versions = [*package["dependencies"].values(), *package["devDependencies"].values()]
    assert all(re.fullmatch(r"[\d.]+", version) for version in versions)
    assert "resolved" not in (SOURCE / "package-lock.json").read_text()


# --- the settings of the chat have every sampling field of the API --------------------------------


def fields() -> list[dict[str, Any]]:
    groups = json.loads((CHAT_SOURCE / "parameters.json").read_bytes())
    return [field for group in groups for field in group["fields"]]


def test_every_sampling_field_can_be_set() -> None:
    shown = {CHAT[field["name"]] for field in fields() if field["name"] in CHAT} | {"n"}
    # "go on from here" of an answer gives its first tokens.
    assert set(CHAT.values()) - shown == {*GRAMMAR_FIELDS, "first_token_ids"}


def test_every_grammar_can_be_chosen() -> None:
    text = (CHAT_SOURCE / "model" / "grammars.js").read_text()
    assert not [name for name in GRAMMAR_FIELDS if f'name: "{name}"' not in text]


def test_every_field_of_the_page_is_one_of_the_api() -> None:
    known = {*CHAT, *ChatRequest.__struct_fields__}
    assert not [field["name"] for field in fields() if field["name"] not in known]
