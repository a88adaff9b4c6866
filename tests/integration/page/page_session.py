"""A gateway before a scripted ring, and its page in a browser."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.browser import Page, open_page
from tests.unit.scripted_ring import ScriptedRing, gateway_before

TIMEOUT_S = 90.0


def in_browser(
    chromium: str,
    rings: ScriptedRing | Mapping[str, ScriptedRing],
    test: Callable[[Page], Awaitable[None]],
    *,
    at: str = "/",
    width: int = 1280,
    may_complain: bool = False,
    **flags: Any,
) -> None:
    """Run a test with the page of a gateway.

    Afterwards the page has asked only this gateway, and no script of it failed or violated the
    content security policy. `may_complain`: the test provokes complaints of the browser itself.
    """

    async def run() -> None:
        async with (
            gateway_before(rings, **flags) as (url, _),
            open_page(chromium, f"{url}{at}", width) as page,
        ):
            await test(page)
            assert page.requests
            assert not [one for one in page.requests if not one.startswith((url, "data:"))]
            assert may_complain or not page.complaints, page.complaints

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
