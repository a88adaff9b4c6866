"""Files, folders and classes that the engineering pages name are in the code."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.users_book import DOCS

ROOT = DOCS.parent
PAGES = [DOCS / "architecture.md", *sorted((DOCS / "engineering").rglob("*.md"))]
CODE = ("quadriga", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc", "http_proc",
        "cluster_proc", "simulator", "bench", "tests", "examples")  # fmt: skip
SUFFIXES = (".py", ".h", ".cpp", ".js", ".mjs", ".css", ".json")
# `weights.py`, `planning/prefill.py`, and `quadriga/server/`.
FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|h|cpp|mjs|css))`")
FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")
# `SchedulerCore`, `RequestLifecycle.restore`, and `SchedulerCore.plan()`.
CLASS = re.compile(r"`((?:[A-Z][a-z0-9]+){2,}(?:\.\w+)?)(?:\(\))?`")
# Names of other projects, and of what is not code of ours.
ELSEWHERE = {"BatchSpanProcessor", "RssAnon", "RssShmem", "RayCluster"}


@cache
def files() -> list[str]:
    """Return the files of the code, by their paths below the root."""
    return [
        path.relative_to(ROOT).as_posix()
        for folder in CODE
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and "node_modules" not in path.parts
    ] + [path.name for path in ROOT.glob("*.py")]


@cache
def words() -> set[str]:
    """Return every word of the code."""
    return {
        word
        for name in files()
        if name.endswith((".py", ".h", ".cpp"))
        for word in re.findall(r"\w+", (ROOT / name).read_text())
    }


def has_file(name: str) -> bool:
    """Return whether a file of the code has a name, or ends with it."""
    return any(file == name or file.endswith(f"/{name}") for file in files())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_folders_exist(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in FILE.findall(text) if not has_file(name)]
    folders = [name for name in FOLDER.findall(text) if name.split("/")[0] in CODE]
    missing += [name for name in folders if not (ROOT / name).is_dir()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_classes_exist(page: Path) -> None:
    named = {part for name in CLASS.findall(page.read_text()) for part in name.split(".")}
    assert not named - words() - ELSEWHERE


def test_a_name_of_nothing_is_found() -> None:
    assert has_file("planning/policies.py")
    assert has_file("launcher.py")
    assert not has_file("lanning/policies.py")
    assert "SchedulerCore" in words()
    assert CLASS.findall("`SchedulerCore.plan()` and `launcher`") == ["SchedulerCore.plan"]


def test_the_example_of_a_family_is_the_code() -> None:
    page = (DOCS / "engineering" / "adding-a-model.md").read_text()
    (example,) = re.findall(r"^```python\n(GPTJ_NAMES.*?)^```", page, re.M | re.S)
    source = (ROOT / "quadriga/server/models/families/gpt.py").read_text()
    for part in re.split(r"\n{2,}", example.strip()):
        assert part in source
