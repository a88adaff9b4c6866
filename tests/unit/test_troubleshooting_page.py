"""docs/errors.md has every error code, and docs/troubleshooting.md quotes texts of the product."""

import ast
import re
from functools import cache
from pathlib import Path

from quadriga import errors
from quadriga.errors import QuadrigaError
from tests.unit.source_files import nodes_of, sources

DOCS = Path(__file__).resolve().parents[2] / "docs"
CODES = re.compile(r"^\| `([a-z_]+)` \| `(\w+)` \|", re.M)
# The first cell of a row of a table with texts.
QUOTE = re.compile(r"^\| `([^`|]+)` \| (?!`)", re.M)


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


def test_every_code_is_on_the_page() -> None:
    public = {
        (error.code, name)
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, QuadrigaError)
    }
    assert set(CODES.findall((DOCS / "errors.md").read_text())) == public


def test_quoted_texts_are_those_of_the_product() -> None:
    quotes = QUOTE.findall((DOCS / "troubleshooting.md").read_text())
    assert len(quotes) >= 40
    missing = [quote for quote in quotes if quote not in texts()]
    assert not missing
