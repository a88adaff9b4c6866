"""The frame of the page: key, colours, widths."""

import pytest

from tests.browser import Page
from tests.integration.page.chat_page import MESSAGE, ask, until_answered, until_text
from tests.integration.page.page_session import in_browser
from tests.unit.scripted_ring import ScriptedRing


def test_the_page_shows_its_first_view(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.until(f"document.querySelector({MESSAGE!r})")
        assert await page.evaluate("document.title") == "Chat · Quadriga"

    in_browser(chromium, ScriptedRing(["x"]), test)


def test_an_address_that_names_no_view_shows_the_first(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.until(f"document.querySelector({MESSAGE!r})")

    in_browser(chromium, ScriptedRing(["x"]), test, at="/#/no-such-view/%E0%A4%A")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button_overrides_them(
    chromium: str, scheme: str
) -> None:
    async def test(page: Page) -> None:
        await page.set_colors(scheme)
        await page.until(f"document.documentElement.dataset.theme === {scheme!r}")
        other = "dark" if scheme == "light" else "light"
        while await page.evaluate("document.documentElement.dataset.theme") != other:
            await page.click("button[aria-label^='Colours']")
        await page.reload()
        assert await page.until("document.documentElement.dataset.theme") == other

    in_browser(chromium, ScriptedRing(["x"]), test)


def test_a_server_that_needs_a_key_is_asked_again_with_the_one_that_is_entered(
    chromium: str,
) -> None:
    ring = ScriptedRing(["an ", "answer"])

    async def test(page: Page) -> None:
        await page.until("document.querySelector('dialog[open] input[name=key]')")
        await page.type("wrong")
        await page.press("Enter")
        await page.until("document.querySelector('dialog[open]')?.innerText.includes('refuses')")
        await page.evaluate("document.querySelector('input[name=key]').select()")
        await page.type("secret")
        await page.press("Enter")
        await until_text(page, ".model", "tiny")
        await ask(page, "Hello")
        await until_text(page, ".answer", "an answer")
        await page.reload()
        await until_answered(page)
        await ask(page, "Hello")
        await until_answered(page, 2)

    in_browser(chromium, ring, test, may_complain=True, api_key="secret")
    assert len(ring.submitted) == 2
