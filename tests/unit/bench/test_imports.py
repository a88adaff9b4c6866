"""No two folders of bench/ import each other."""

from collections import defaultdict
from pathlib import Path

from tests.unit.imported_names import imported_names

ROOT = Path(__file__).resolve().parents[3]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "bench").rglob("*.py")
}


def imports_of(module: str) -> set[str]:
    """Return the modules of bench that a module imports, in functions and for types too."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return set(imported_names(path) & MODULES) - {module, "bench"}


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def folder_of(module: str) -> str:
    """Return the second part of a module's name: a folder, or a file beside the folders."""
    return module.split(".")[1]


MODULE_GRAPH = {module: imports_of(module) for module in MODULES}


def test_no_two_folders_import_each_other() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, imported in MODULE_GRAPH.items():
        if module != "bench":
            graph[folder_of(module)] |= {folder_of(name) for name in imported}
    for folder in graph:
        graph[folder].discard(folder)
    assert not [folder for folder in list(graph) if folder in reachable(folder, graph)]
