"""Every relative link and anchor of the docs leads to something, and every tool of them exists."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Files beside Markdown that name pages: code, the page's sources, deployment, workflows.
SUFFIXES = ("*.py", "*.js", "*.mjs", "*.yml", "*.yaml", "*.conf", "*.service", "*.sh", "Makefile")
FOLDERS = ("", ".github", "deploy", "examples", "http_proc/page/source/views", "quadriga",
           "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc", "http_proc/core",
           "cluster_proc", "simulator", "bench", "tests")  # fmt: skip
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")


def without_code(text: str) -> str:
    """Return Markdown without its code, in which brackets are no links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and mkdocs give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in LINK.findall(without_code(page.read_text())):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file():
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target):
            broken.append(f"{link}: no such heading")
    assert not broken, "\n".join(broken)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r": (\S+\.md)$", navigation, re.M))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    own = {path.removeprefix("repository/") for path in listed if path.startswith("repository/")}
    assert listed - {f"repository/{name}" for name in own} == pages
    assert all((ROOT / name).is_file() for name in own)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],  # which names those of its time
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_tools_that_a_page_names_exist(page: Path) -> None:
    tools = set(re.findall(r"(?:python -m |`)(bench(?:\.[a-z]\w*)+)", page.read_text()))
    paths = {tool: ROOT / tool.replace(".", "/") for tool in tools}
    missing = [t for t, p in paths.items() if not (p.is_dir() or p.with_suffix(".py").is_file())]
    assert not missing, missing


def files_beside_markdown() -> set[Path]:
    """Return the files that may name a page of the docs in a comment or in a text."""
    return {
        path
        for folder in FOLDERS
        for suffix in SUFFIXES
        for path in ((ROOT / folder).rglob(suffix) if folder else ROOT.glob(suffix))
    }


def test_pages_that_code_and_deployment_name_exist() -> None:
    named = {
        (path, name)
        for path in files_beside_markdown()
        for name in re.findall(r"(?<!ggml, )\bdocs/[\w/-]+\.md\b", path.read_text(errors="replace"))
    }
    assert len(named) > 20
    assert not [f"{path}: {name}" for path, name in named if not (ROOT / name).is_file()]
