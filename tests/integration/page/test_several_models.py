"""The page of a server with several models: which one a chat, a feed and a simulation are about."""

import json
from pathlib import Path

import msgspec

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.adapters.store import LIST_NAME, AdapterEntry, AdapterStore
from tests.browser import Page
from tests.integration.page.chat_page import ask, text_of, until_answered
from tests.integration.page.live_page import live_ring, until_live
from tests.integration.page.page_session import in_browser
from tests.integration.page.what_if_page import ASK
from tests.unit.http.measured_ring import MeasuredRing
from tests.unit.scripted_ring import FACTS, ScriptedRing

CHOICE = "select[aria-label='Model']"
NAMES = f"[...document.querySelector({json.dumps(CHOICE)}).options].map((one) => one.value)"


async def choose(page: Page, name: str) -> None:
    """Choose a model in the head of a view."""
    found = f"document.querySelector({json.dumps(CHOICE)})"
    await page.until(found)
    await page.evaluate(
        f"{found}.value = {json.dumps(name)};"
        f"{found}.dispatchEvent(new Event('change', {{ bubbles: true }}))"
    )
    await page.until(f"{found}.value === {json.dumps(name)}")


def test_a_chat_is_answered_by_the_chosen_model(chromium: str) -> None:
    encoder = ScriptedRing([])
    encoder.facts = {**FACTS, "chat": False, "encoder": True, "embeddings": True}
    rings = {
        "vec": encoder,
        "a": ScriptedRing(["from a"]),
        "org/b gpt-4o": ScriptedRing(["from b"]),
    }
    rings["org/b gpt-4o"].facts["context_length"] = 4321

    async def test(page: Page) -> None:
        await page.until(f"document.querySelector({json.dumps(CHOICE)})")
        assert await page.evaluate(NAMES) == ["a", "org/b"]
        assert await text_of(page, ".welcome h2") == "a"
        await ask(page, "Hello")
        await until_answered(page)
        assert await text_of(page, ".answer .markdown") == "from a"
        await choose(page, "org/b")
        await ask(page, "And you?")
        await until_answered(page, 2)
        assert "from b" in await page.evaluate("document.querySelector('.thread').innerText")
        assert [len(ring.submitted) for ring in rings.values()] == [0, 1, 1]
        # A new chat begins with the model of the last one.
        await page.evaluate("location.hash = '#/chat'")
        await page.until("document.querySelector('.welcome h2')?.innerText === 'b'")
        assert "4,321 tokens" in await text_of(page, ".welcome p")

    in_browser(chromium, rings, test)


def test_the_choice_has_the_adapters_and_says_which_are_pinned(
    chromium: str, tmp_path: Path
) -> None:
    ring = ScriptedRing(["x"])
    ring.adapters = AdapterStore(tmp_path, tmp_path, ModelArgs(enable_lora=True), max_loras=2)
    entries = [
        AdapterEntry(name="tone", path="/tone", id="1", pinned=True),
        AdapterEntry(name="sql", path="/sql", id="2"),
    ]
    (tmp_path / LIST_NAME).write_bytes(msgspec.json.encode(entries))

    async def test(page: Page) -> None:
        await page.until(f"document.querySelector({json.dumps(CHOICE)})")
        assert await page.evaluate(NAMES.replace("value", "text")) == [
            "tiny", "tone (pinned)", "sql",
        ]  # fmt: skip

    in_browser(chromium, ring, test)


def test_one_model_has_no_choice(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.until("document.querySelector('.model')?.innerText === 'tiny'")
        assert not await page.evaluate(f"Boolean(document.querySelector({json.dumps(CHOICE)}))")

    in_browser(chromium, ScriptedRing(["x"]), test)


def test_the_live_view_shows_the_chosen_model(chromium: str) -> None:
    rings = {"a": ScriptedRing(["x"]), "org/b": live_ring()}

    async def test(page: Page) -> None:
        await choose(page, "org/b")
        await until_live(page)
        assert [ring.num_watches for ring in rings.values()] == [1, 1]
        assert await page.evaluate("location.hash") == "#/live/0/org%2Fb"

    in_browser(chromium, rings, test, at="/#/live")


def test_what_if_has_the_load_of_the_chosen_model(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.evaluate(ASK)
        about = "document.querySelector('.what-if-about')?.innerText"
        await page.until(f"{about}.startsWith('3 answers')")
        await choose(page, "b")
        await page.until(f"{about}.startsWith('No request')")

    in_browser(chromium, {"a": MeasuredRing(), "b": MeasuredRing()}, test, at="/#/what-if")
