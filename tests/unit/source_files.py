"""The product's files, parsed once for all tests of the shape of the code."""

import ast
from functools import cache
from pathlib import Path

from tests.house import PRODUCT, ROOT, House, Source

__all__ = ["PRODUCT", "ROOT", "house", "imported_names", "nodes_of", "sources", "texts"]


@cache
def house() -> House:
    """Return the files of this tree."""
    return House(ROOT)


@cache
def _by_path() -> dict[Path, Source]:
    files = [*house().product.values(), Source(ROOT / "launcher.py", ROOT)]
    return {ROOT / source.path: source for source in files}


def sources() -> dict[str, Path]:
    """Return every module of the product by its dotted name."""
    return {source.name: path for path, source in _by_path().items()}


def nodes_of(path: Path) -> list[ast.AST]:
    """Return the nodes of a module's syntax tree."""
    return _by_path()[path].nodes


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, also in functions and for type checking only.

    `from a import b` gives both `a` and `a.b`, since `b` may be a module.
    """
    imported = _by_path()[path].imported_names
    return frozenset(
        name
        for _, module, part, _ in imported
        for name in (module, f"{module}.{part}" * bool(part))
    ) - {""}


@cache
def texts() -> str:
    """Return every text of the product, with … for a value that is filled in."""
    found = []
    for path in sources().values():
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ]
                found.append("".join(map(str, parts)))
    return "\n".join(found)
