"""The page on a phone."""

import pytest

from tests.browser import Page
from tests.integration.page.chat_page import (
    ask,
    button,
    set_settings,
    until_answered,
    until_text,
)
from tests.integration.page.page_ring import ChoicesRing, fair_logprobs
from tests.integration.page.page_session import in_browser
from tests.unit.scripted_ring import ScriptedRing

LONG = [
    "x" * 300,
    "\n\n| a | b | c | d |\n|---|---|---|---|\n",
    "| one long cell | two long cells | three long cells | four |\n\n",
    "```\n" + "y" * 300,
]
WIDEST = (
    "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth,"
    " document.querySelector('.scroller').scrollWidth) - innerWidth"
)


@pytest.mark.parametrize("width", [320, 390, 800])
def test_nothing_is_wider_than_the_window(chromium: str, width: int) -> None:
    async def test(page: Page) -> None:
        await page.resize(width, 700, is_phone=True)
        await set_settings(page, numAnswers=2)
        await ask(page, "z" * 200)
        await until_answered(page, 2)
        assert await page.evaluate(WIDEST) <= 0
        await page.click(button("Settings"))
        assert await page.evaluate(WIDEST) <= 0
        await page.click(button("Close settings"))

    in_browser(chromium, ChoicesRing(LONG), test)


@pytest.mark.parametrize("width", [320, 390])
def test_tokens_and_their_alternatives_are_not_cut_off(chromium: str, width: int) -> None:
    ring = ScriptedRing(["Plants make food", " chloroplasts-and-photosynthesis", " of light"])
    ring.logprobs = fair_logprobs

    async def test(page: Page) -> None:
        await page.resize(width, 700, is_phone=True)
        await set_settings(page, hasProbabilities=True)
        await ask(page, "How?")
        await until_answered(page)
        await page.click(button("Token probabilities"))
        await page.evaluate("document.querySelector('[data-token=\"1\"]').focus()")
        await until_text(page, "table.alternatives", "other")
        for part in (".token-text", "table.alternatives"):
            right = f"document.querySelector({part!r}).getBoundingClientRect().right"
            assert await page.evaluate(right) <= width

    in_browser(chromium, ring, test)


def test_the_list_of_conversations_is_a_drawer(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.resize(390, 700, is_phone=True)
        await ask(page, "Hello")
        await until_answered(page)
        await page.click(button("Conversations"))
        await page.click(".conversations a")
        await page.until("document.querySelector('.chat').dataset.panel === ''")

    in_browser(chromium, ScriptedRing(["x"]), test)
