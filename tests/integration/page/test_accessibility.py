"""Every view can be used with keys and a screen reader, and read: axe-core finds nothing."""

from tests.browser import Page
from tests.integration.page.accessibility import check_appearances, violations
from tests.integration.page.chat_page import ask, button, set_settings, until_answered
from tests.integration.page.live_page import live_ring, until_live
from tests.integration.page.page_ring import ChoicesRing, OpenRing, fair_logprobs
from tests.integration.page.page_session import in_browser
from tests.integration.page.request_page import StoryRing, to_story
from tests.integration.page.what_if_page import simulate
from tests.unit.http.measured_ring import MeasuredRing
from tests.unit.scripted_ring import ScriptedRing

MARKDOWN = [
    "# A title\n\nA [link](https://example.org), `code`, and **bold**.\n\n",
    "- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n",
    "```python\ndef f(x):\n    return x + 1  # a comment\n```\n",
]


def test_a_violation_is_found(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.until("document.querySelector('textarea')")
        await page.evaluate("document.querySelector('textarea').removeAttribute('aria-label')")
        await page.evaluate("document.querySelector('textarea').removeAttribute('placeholder')")
        assert any(one.startswith("label:") for one in await violations(page))

    in_browser(chromium, ScriptedRing(["x"]), test)


def test_an_empty_chat_and_the_dialog_for_a_key(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.until("document.querySelector('.welcome h2')?.innerText === 'tiny'")
        await check_appearances(page, "empty chat")
        await page.click("button[aria-label^='API key']")
        await page.until("document.querySelector('dialog[open]')")
        await check_appearances(page, "key")

    in_browser(chromium, ScriptedRing(["x"]), test)


def test_a_conversation_with_its_settings(chromium: str) -> None:
    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await until_answered(page)
        await check_appearances(page, "answer")
        await page.resize(1280, 800)
        await page.click(button("Settings"))
        await page.until("document.querySelector('.settings')")
        await page.evaluate(
            "document.querySelectorAll('details').forEach((one) => one.open = true)"
        )
        await check_appearances(page, "settings")

    in_browser(chromium, ScriptedRing(MARKDOWN), test)


def test_the_choice_of_a_model(chromium: str) -> None:
    async def test(page: Page) -> None:
        for view in ("chat", "live", "what-if"):
            await page.evaluate(f"location.hash = '#/{view}'")
            await page.until(f"document.querySelector('.view-{view} select[aria-label=Model]')")
            await check_appearances(page, f"models at {view}")

    in_browser(chromium, {"a": MeasuredRing(), "org/b": MeasuredRing()}, test)


def test_an_answer_that_runs(chromium: str) -> None:
    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await page.until("document.querySelector('.answer .markdown')")
        await check_appearances(page, "running answer")

    in_browser(chromium, OpenRing(MARKDOWN), test)


def test_several_answers_with_their_tokens(chromium: str) -> None:
    ring = ChoicesRing(["one", " two"])
    ring.logprobs = fair_logprobs

    async def test(page: Page) -> None:
        await set_settings(page, numAnswers=2, hasProbabilities=True)
        await ask(page, "Hello")
        await until_answered(page, 2)
        await page.click(button("Token probabilities"))
        await page.until("document.querySelector('.token')")
        await check_appearances(page, "tokens")

    in_browser(chromium, ring, test)


def test_live(chromium: str) -> None:
    async def test(page: Page) -> None:
        await until_live(page)
        await page.evaluate("document.querySelector('.lanes-space canvas').focus()")
        await page.press("ArrowDown")
        await check_appearances(page, "live")

    in_browser(chromium, live_ring(), test, at="/#/live")


def test_requests(chromium: str) -> None:
    async def test(page: Page) -> None:
        await to_story(page)
        await page.click(".span.depth-1")
        await check_appearances(page, "one request")
        await page.evaluate("location.hash = '#/request'")
        await check_appearances(page, "requests")

    in_browser(chromium, StoryRing(["an answer"]), test)


def test_what_if(chromium: str) -> None:
    async def test(page: Page) -> None:
        await simulate(page)
        await check_appearances(page, "what if")

    in_browser(chromium, MeasuredRing(), test, at="/#/what-if")
