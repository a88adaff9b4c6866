"""Streams of the page over reloads, lost connections and stops."""

import asyncio

from tests.browser import Page
from tests.integration.page.chat_page import (
    ask,
    button,
    text_of,
    until_answered,
    until_saved,
    until_text,
)
from tests.integration.page.page_ring import OpenRing
from tests.integration.page.page_session import in_browser


def test_a_reload_in_mid_answer_reads_on(chromium: str) -> None:
    ring = OpenRing(["One", " two"])

    async def test(page: Page) -> None:
        await ask(page, "Count")
        await until_saved(page, "Count", "One two", "streaming")
        await page.reload()
        await until_text(page, ".answer", "One two")
        ring.push(" three")
        await until_text(page, ".answer", "One two three")
        ring.finish(" four")
        await until_answered(page)
        assert "One two three four" in await text_of(page, ".answer")

    in_browser(chromium, ring, test)
    assert len(ring.submitted) == 1


def test_what_arrives_while_the_network_is_gone_is_read_afterwards(chromium: str) -> None:
    ring = OpenRing(["One"])

    async def test(page: Page) -> None:
        await ask(page, "Count")
        await until_text(page, ".answer", "One")
        await page.set_offline(True)
        ring.push(" two")
        await page.set_offline(False)
        ring.finish(" three")
        await until_text(page, ".answer", "One two three")
        await until_answered(page)

    in_browser(chromium, ring, test, may_complain=True)


def test_stop_after_a_reload_ends_the_request(chromium: str) -> None:
    ring = OpenRing(["One"])

    async def test(page: Page) -> None:
        await ask(page, "Count")
        await until_saved(page, "Count", "One", "streaming")
        await page.reload()
        await until_text(page, ".answer", "One")
        await page.click(button("Stop"))
        await until_answered(page)
        while not ring.num_aborted:
            await asyncio.sleep(0.01)

    in_browser(chromium, ring, test)


def test_an_answer_that_the_server_has_forgotten_is_kept_as_far_as_it_came(chromium: str) -> None:
    ring = OpenRing(["One", " two"])

    async def test(page: Page) -> None:
        await ask(page, "Count")
        await until_saved(page, "Count", "One two", "streaming")
        address = await page.evaluate("location.href")
        await page.open("about:blank")
        ring.finish()
        await page.open(address)
        await until_text(page, ".problem", "does not have the rest")
        assert "One two" in await text_of(page, ".answer")
        ring.pieces, ring.leaves_open = [" three"], False
        await page.click(button("Continue"))
        await until_text(page, ".answer", "One two three")

    in_browser(chromium, ring, test, may_complain=True, resume_window=0.05)
