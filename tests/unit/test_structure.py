"""The shape of the code: circles, names, words, and the map in the docs."""

import ast
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.source_files import PRODUCT, ROOT, house, nodes_of, sources

MAP = ROOT / "docs" / "architecture.md"
BANNED = re.compile(r"\b(told|somebody|anybody|everybody|nobody|whoever|whom|card|cards)\b", re.I)
CONSTANT_PREFIXES = re.compile(r"\b_?(MOST|LEAST|LONGEST|SHORTEST)_")


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


def test_no_test_module_imports_another() -> None:
    found = house().imports_between_tests()
    assert not found, "helpers of several tests go to a module of another name: " + str(found)


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
        for token in _tokens(path, CONSTANT_PREFIXES)
        if token.type == tokenize.NAME and CONSTANT_PREFIXES.match(token.string)
    ]
    assert not found


@pytest.mark.parametrize("package", [*PRODUCT, "launcher.py"])
def test_comments_and_texts_use_the_words_of_the_field(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {match.group()}"
        for path in sources().values()
        if path.relative_to(ROOT).parts[0] == package
        for token in _tokens(path, BANNED)
        if token.type in (tokenize.STRING, tokenize.COMMENT)
        for match in BANNED.finditer(token.string)
    ]
    assert not found, "\n".join(found)


def _tokens(path: Path, pattern: re.Pattern[str]) -> list[tokenize.TokenInfo]:
    """Return the tokens of a file in which the pattern occurs at all."""
    if not pattern.search(path.read_text()):
        return []
    with path.open("rb") as file:
        return list(tokenize.tokenize(file.readline))


FILE_NAME = re.compile(r"(?<![\w./*-])(?:[\w-]+/)*[a-z_]\w*\.py\b")
FILES_ELSEWHERE = {
    "conversion/gemma.py": "llama.cpp",
    "encoder.py": "GPT-2",
    "granite.py": "llama.cpp",
    "masking_utils.py": "transformers",
    "modeling_rope_utils.py": "transformers",
    "models/auto/modeling_auto.py": "transformers",
    "olmo.py": "llama.cpp",
}


def test_files_that_comments_and_texts_name_exist() -> None:
    folders = (ROOT / name for name in (*PRODUCT, "tests", "examples"))
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    ours = {f"/{path.relative_to(ROOT)}" for path in files}
    missing, elsewhere = [], set()
    for path in sources().values():
        for token in _tokens(path, FILE_NAME):
            if token.type not in (tokenize.STRING, tokenize.COMMENT):
                continue
            for name in FILE_NAME.findall(token.string):
                if name in FILES_ELSEWHERE:
                    elsewhere.add(name)
                elif not any(file.endswith(f"/{name}") for file in ours):
                    missing.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {name}")
    assert not missing, "\n".join(missing)
    assert elsewhere == FILES_ELSEWHERE.keys(), "no comment names the others any more"


# --- the docs ---------------------------------------------------------------------------------


def test_the_map_of_folders_is_that_of_the_tree() -> None:
    text = MAP.read_text()
    mapped = set(re.findall(r"^\| `([a-z_/]+)/` \|", text, re.M))
    folders = {str(path.parent.relative_to(ROOT)) for path in sources().values()} - {"."}
    assert mapped == folders


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h|cpp|json))`", page.read_text())
    missing = [name for name in named if name.split("/")[0] in (*PRODUCT, "tests", "examples")
               and not (ROOT / name).exists()]  # fmt: skip
    assert not missing
