"""docs/troubleshooting.md has every error code, and quotes texts of the product."""

import re
from pathlib import Path

from quadriga import errors
from quadriga.errors import QuadrigaError
from tests.unit.source_files import texts

DOCS = Path(__file__).resolve().parents[2] / "docs"
CODES = re.compile(r"^\| `([a-z_]+)` \| `(\w+)`[^|]* \|", re.M)
# The first cell of a row of a table with texts.
QUOTE = re.compile(r"^\| `([^`|]+)` \| (?!`)", re.M)


def test_every_code_is_on_the_page() -> None:
    public = {
        (error.code, name)
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, QuadrigaError)
    }
    assert set(CODES.findall((DOCS / "troubleshooting.md").read_text())) == public


def test_quoted_texts_are_those_of_the_product() -> None:
    quotes = QUOTE.findall((DOCS / "troubleshooting.md").read_text())
    assert len(quotes) >= 40
    missing = [quote for quote in quotes if quote not in texts()]
    assert not missing
