"""The request view in a browser: the story of an answer, ids that do not exist, widths."""

import json

import pytest

from tests.browser import Page
from tests.integration.page.chat_page import ask, text_of, until_text
from tests.integration.page.page_session import in_browser
from tests.integration.page.request_page import StoryRing, to_story
from tests.unit.scripted_ring import ScriptedRing

WIDTHS = "[...document.querySelectorAll('.bar')].map((bar) => bar.getBoundingClientRect().width)"


def test_an_answer_leads_to_its_story_with_the_reasons_why_it_waited(chromium: str) -> None:
    async def test(page: Page) -> None:
        await to_story(page)
        text = await text_of(page, ".waterfall")
        for part in ("4 requests waited before it", "waits: pages", "No KV page is free for it",
                     "retracted", "others needed its pages", "detokenize"):  # fmt: skip
            assert part in text
        figures = await text_of(page, ".request-figures")
        assert "retractions" in figures and "34" in figures
        assert all(width >= 2 for width in await page.evaluate(WIDTHS))

    in_browser(chromium, StoryRing(["an answer"]), test)


def test_sentences_say_why_it_took_so_long_and_the_delivery_comes_last(chromium: str) -> None:
    async def test(page: Page) -> None:
        await to_story(page)
        story = await text_of(page, ".request-story")
        for part in (
            "most of it to generate the answer: 390 ms",
            "300 ms in the queue, behind 4 requests: no KV page was free for it (--max-total",
            "5 tokens came from the prefix cache",
            "28 ms per token: 14 tokens in 390 ms, one in each step. The steps had up to 20 rows",
            "6 prompts or parts of them were computed in between (1,624 tokens), in steps that",
            "The worker computed 300 ms for it; for 90 ms it was in no step",
            "The longest time between two tokens was 110 ms",
            "It lost its place once and was computed again: others needed its pages",
        ):
            assert part in story, story
        names = "[...document.querySelectorAll('.span-name')].map((one) => one.firstChild.data)"
        assert (await page.evaluate(names))[-1] == "deliver"
        await page.evaluate("[...document.querySelectorAll('.span.depth-1')].at(-3).click()")
        details = await text_of(page, ".span-details")
        assert "150 ms" in details and "compute_ms" not in details and "150.0" not in details

    in_browser(chromium, StoryRing(["an answer"]), test)


ASK = """Promise.all(['load-1', 'load-2'].map((id) => fetch('v1/completions', {method: 'POST',
    headers: {'Content-Type': 'application/json', 'X-Request-Id': id}, body: '{"prompt": "a"}'})
    .then((response) => response.text()))).then(() => true)"""
ROWS = "[...document.querySelectorAll('.recent tbody th')].map((one) => one.innerText)"


def test_recent_requests_are_listed_and_one_opens_by_a_click(chromium: str) -> None:
    async def test(page: Page) -> None:
        await until_text(page, ".recent", "No request to the model")
        await page.evaluate(ASK)
        await page.until(f"{ROWS}.length === 2")
        await page.evaluate("document.querySelectorAll('.segments input')[1].click()")
        await page.until(f"{ROWS}.sort().join() === 'load-1,load-2'")
        await page.click(".recent tbody tr:last-child a")
        await page.until("document.querySelector('.request-story li')")
        assert "cmpl-load-" in await text_of(page, ".request-head h1")
        await page.click(".request-head a")
        await page.until(f"{ROWS}.length === 2")

    in_browser(chromium, StoryRing(["an answer"]), test, at="/#/request")


def test_the_list_is_not_wider_than_a_phone(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.evaluate(ASK)
        await page.resize(320, 700, is_phone=True)
        await page.until(f"{ROWS}.length === 2")
        widest = "Math.max(document.documentElement.scrollWidth, document.querySelector('.request-body').scrollWidth)"  # noqa: E501
        assert await page.evaluate(widest) <= 320

    in_browser(chromium, StoryRing(["an answer"]), test, at="/#/request")


def test_keys_open_a_span_and_the_export_is_the_servers_own_file(chromium: str) -> None:
    async def test(page: Page) -> None:
        await to_story(page)
        await page.evaluate("document.querySelector('.span.depth-1').focus()")
        await page.press("Enter")
        await until_text(page, ".span-details", "begins")
        await page.evaluate(
            """(() => {
                const make = URL.createObjectURL;
                URL.createObjectURL = (blob) => {
                    blob.text().then((text) => window.exported = text);
                    return make(blob);
                };
            })()"""
        )
        await page.click(".request-head > button")
        trace = json.loads(await page.until("window.exported"))
        names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
        assert names.count("queue") == 2 and "/v1/chat/completions" in names

    in_browser(chromium, StoryRing(["an answer"]), test)


def test_an_id_that_does_not_exist_says_so_and_what_to_do(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.click("input[name=id]")
        await page.type("<img src=x onerror=alert(1)>/..")
        await page.press("Enter")
        await until_text(page, ".error-text", "<img src=x onerror=alert(1)>/..")
        assert "--keep-traces all" in await text_of(page, ".error-text")

    in_browser(chromium, ScriptedRing([]), test, at="/#/request", may_complain=True)


def test_the_story_of_a_request_that_runs_appears_at_its_end(chromium: str) -> None:
    ring = StoryRing(["an answer"], leaves_open=True)

    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await until_text(page, ".answer", "an answer")
        await page.evaluate("location.hash = '#/request/0'")  # the id in the live feed
        await until_text(page, ".request-body", "is being answered")
        ring.finish()
        await page.until("document.querySelector('.waterfall')")

    in_browser(chromium, ring, test, may_complain=True)


@pytest.mark.parametrize("width", [320, 390])
def test_the_story_is_not_wider_than_a_phone(chromium: str, width: int) -> None:
    async def test(page: Page) -> None:
        await page.resize(width, 700, is_phone=True)
        await to_story(page)
        await page.click(".span.depth-0")
        widest = "Math.max(document.documentElement.scrollWidth, document.querySelector('.request').scrollWidth)"  # noqa: E501
        assert await page.evaluate(widest) <= width

    in_browser(chromium, StoryRing(["an answer"]), test)
