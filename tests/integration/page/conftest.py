"""The browser that the tests of the page share."""

from collections.abc import Iterator

import pytest

from tests.browser import PROGRAMS, find_chromium, running_chromium


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """Yield the address of a running browser."""
    program = find_chromium()
    if program is None:
        pytest.skip(f"no browser: install one of {', '.join(PROGRAMS)} (Debian: chromium)")
    with running_chromium(program) as address:
        yield address
