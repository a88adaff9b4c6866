"""A figure that a page quotes is in the table of the appendix that it links to.

Checked are the texts of links to docs/engineering/measurements/ and to the figures of
docs/engineering/performance.md, and in a table whose first cell has such a link, all further cells.
A quoted number may be a rounded one: 6.2 for 6.22. The appendix itself has date and command.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.users_book import DOCS

ROOT = DOCS.parent
APPENDIX = DOCS / "engineering" / "measurements"
FIGURES = DOCS / "engineering" / "performance.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), FIGURES]
NUMBER = re.compile(r"(?<![\w.,])\d(?:[\d,]*\d)?(?:\.\d+)?(?![\d]|\w)")
LINK = re.compile(r"\[([^]]*)\]\(([^)#\s]+)(?:#([^)\s]*))?\)")


@dataclass(frozen=True)
class Quote:
    """A text with figures, and the section in which they must be."""

    text: str
    page: Path
    anchor: str


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, without its code and the addresses of its links."""
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def is_quoted(number: str, section: list[str]) -> bool:
    """Return whether a number, or one that is rounded to it, is in a section."""
    places = len(number.partition(".")[2])
    return any(round(float(other), places) == float(number) for other in section)


@cache
def section(page: Path, anchor: str) -> str:
    """Return a page from a heading to the next one of its level, or all of it without an anchor."""
    text = page.read_text()
    if not anchor:
        return text
    for match in re.finditer(r"^(#+) (.+)$", text, re.M):
        if re.sub(r"[^\w\- ]", "", match[2].lower()).strip().replace(" ", "-") == anchor:
            end = re.search(rf"^#{{1,{len(match[1])}}} ", text[match.end() :], re.M)
            return text[match.start() : match.end() + end.start() if end else len(text)]
    raise AssertionError(f"{page.name} has no heading {anchor}")


def quotes(page: Path) -> Iterator[Quote]:
    """Yield the texts of a page that quote the appendix."""
    for line in page.read_text().splitlines():
        cells = line.split("|")[1:-1] if line.startswith("|") else []
        for match in LINK.finditer(line):
            target = (page.parent / match[2]).resolve()
            if target.parent != APPENDIX and not (target == FIGURES and match[3]):
                continue
            yield Quote(match[1], target, match[3] or "")
            if cells and match[0] in cells[0]:
                yield Quote(" ".join(cells[1:]), target, match[3] or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_figures_are_in_the_appendix(page: Path) -> None:
    missing = [
        f"{number} of {quote.text!r} is not in {quote.page.name}#{quote.anchor}"
        for quote in quotes(page)
        for number in numbers(quote.text)
        if not is_quoted(number, numbers(section(quote.page, quote.anchor)))
    ]
    assert not missing, "\n".join(missing)


def test_many_figures_are_checked() -> None:
    assert sum(len(numbers(quote.text)) for page in PAGES for quote in quotes(page)) > 100


def test_a_wrong_figure_is_found() -> None:
    table = numbers("| decode | 6.22 | 1,229 tok/s | `--width 64` |")
    assert table == ["6.22", "1229"]
    assert is_quoted("6.2", table)
    assert not is_quoted("6.3", table)
    assert not is_quoted("64", table)


@pytest.mark.parametrize("page", sorted(APPENDIX.glob("*.md")), ids=lambda page: page.name)
def test_a_page_of_the_appendix_has_dates_and_commands(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"\b2026-\d\d-\d\d\b|\bNovember 2026\b", text)
    assert re.search(r"python -m \w+|pytest ", text)
