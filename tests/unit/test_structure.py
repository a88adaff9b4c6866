"""The shape of the code: circles, names, words, and the map in the docs."""

import ast
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quadriga", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc",
            "http_proc", "cluster_proc", "simulator", "bench")  # fmt: skip
MAP = ROOT / "docs" / "architecture.md"
BANNED = re.compile(r"\b(told|somebody|anybody|everybody|nobody|whoever|whom|card|cards)\b", re.I)
CONSTANT_PREFIXES = re.compile(r"^_?(MOST|LEAST|LONGEST|SHORTEST)_")


@cache
def sources() -> dict[str, Path]:
    """Return every module of the product by its dotted name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    named["launcher"] = ROOT / "launcher.py"
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a module's syntax tree, which several tests read."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> set[str]:
    """Return the product's modules that a file imports, also for type checking only."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & sources().keys()
            # `from package import module` runs the package's __init__.py, too; that of quadriga
            # imports what it passes on at its first use.
            is_lazy = node.module == "quadriga" and submodules
            names |= submodules if is_lazy else submodules | {node.module}
    return names & sources().keys()


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: imports_of(path) - {name} for name, path in sources().items()}
    done: set[str] = set()
    circles: list[list[str]] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            circles.append([*path[path.index(name) :], name])
        elif name not in done:
            for imported in sorted(graph[name]):
                visit(imported, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    assert not circles, "\n".join(" -> ".join(circle) for circle in circles)


def test_class_names_occur_once() -> None:
    names = Counter(
        node.name
        for path in sources().values()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_bounds_are_called_max_and_min() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {token.string}"
        for path in sources().values()
        for token in _tokens(path)
        if token.type == tokenize.NAME and CONSTANT_PREFIXES.match(token.string)
    ]
    assert not found


@pytest.mark.parametrize("package", [*PACKAGES, "launcher.py"])
def test_comments_and_texts_use_the_words_of_the_field(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {match.group()}"
        for path in sources().values()
        if path.relative_to(ROOT).parts[0] == package
        for token in _tokens(path)
        if token.type in (tokenize.STRING, tokenize.COMMENT)
        for match in BANNED.finditer(token.string)
    ]
    assert not found, "\n".join(found)


@cache
def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    with path.open("rb") as file:
        return list(tokenize.tokenize(file.readline))


# --- the docs ---------------------------------------------------------------------------------


def test_the_map_of_folders_is_that_of_the_tree() -> None:
    text = MAP.read_text()
    mapped = set(re.findall(r"^\| `([a-z_/]+)/` \|", text, re.M))
    folders = {str(path.parent.relative_to(ROOT)) for path in sources().values()} - {"."}
    assert mapped == folders


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|cpp|json))`", page.read_text())
    missing = [name for name in named if name.split("/")[0] in (*PACKAGES, "tests", "examples")
               and not (ROOT / name).exists()]  # fmt: skip
    assert not missing
