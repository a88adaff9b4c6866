"""The names that a module imports, for tests of the structure of the code."""

import ast
from functools import cache
from pathlib import Path


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, also in functions and for type checking only.

    `from a import b` gives both `a` and `a.b`, since `b` may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)
