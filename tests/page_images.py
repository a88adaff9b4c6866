"""Make the pictures of the page for the docs: `python -m tests.page_images URL FOLDER`.

A server runs at URL, on a machine that has nothing else to do: the pictures show its speed. It gets
20 streams at once, each with an X-Request-Id of its own, while Chromium looks at every view in
light and dark colours and as a phone.
"""

import argparse
import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp

from tests.browser import Page, find_chromium, open_page, running_chromium
from tests.integration.page.chat_page import ask, set_settings

NUM_STREAMS, LIVE_S, RUN_S = 20, 12.0, 20.0
TEXT = "The prefix cache keeps the pages of earlier prompts. "
QUESTION = "How do plants make food?"
PRESETS = ("fewer streams at once", "streams before prompts", "twice the replicas")
SHOWN = frozenset([
    "page-chat", "page-settings-dark", "page-chat-phone", "page-live", "page-live-dark",
    "page-live-phone", "page-requests", "page-requests-phone", "page-request", "page-request-dark",
    "page-what-if", "page-what-if-results", "page-what-if-results-dark",
    "page-what-if-results-phone",
])  # fmt: skip
"""The pictures that docs/page.md shows; the others are for a look at every view."""
APPEARANCES = {"": ("light", 1280), "-dark": ("dark", 1280), "-phone": ("light", 390)}


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """Send a request and read its answer."""
    rng = random.Random(number)
    prompt = TEXT * rng.randrange(1, 40) + f"Question {number}: tell a long story about a horse."
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True,
            "max_tokens": rng.randrange(60, 300), "temperature": 0.8}  # fmt: skip
    headers = {"X-Request-Id": f"load-{number}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        async for _ in answer.content:
            pass


@asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Keep NUM_STREAMS running in a `with` block."""
    numbers = itertools.count()

    async def client() -> None:
        while True:
            await stream(session, url, next(numbers))

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        clients = [asyncio.create_task(client()) for _ in range(NUM_STREAMS)]
        try:
            yield
        finally:
            for one in clients:
                one.cancel()
            for one in clients:
                with suppress(asyncio.CancelledError):
                    await one


class Folder(NamedTuple):
    """Where pictures go. takes_all: also those that the docs do not show."""

    path: Path
    takes_all: bool


async def take(
    page: Page, folder: Folder, name: str, pointer: tuple[int, int] = (1, 1), script: str = "0"
) -> None:
    """Take the pictures of what the page shows.

    Args:
        page: shows it.
        folder: of the pictures.
        name: of the pictures, without what they are of.
        pointer: place of the mouse, in CSS pixels.
        script: runs after each change of the width.
    """
    for suffix, (scheme, width) in APPEARANCES.items():
        if f"{name}{suffix}" not in SHOWN and not folder.takes_all:
            continue
        await page.set_colors(scheme)
        await page.resize(width, 800, is_phone=width < 800)
        await page.evaluate(script)
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=pointer[0], y=pointer[1])
        await asyncio.sleep(1)  # charts and lanes are drawn again
        await page.screenshot(folder.path / f"{name}{suffix}.webp")
    await page.set_colors("light")
    await page.resize(1280, 800)


async def go(page: Page, place: str, until: str) -> None:
    """Show a view, until an element of it is there."""
    await page.evaluate(f"location.hash = '#/{place}'")
    await page.until(f"document.querySelector({until!r})")


async def chat(page: Page, folder: Folder) -> None:
    """Take an answer that runs, its tokens, and the settings."""
    values = {"max_tokens": "90", "temperature": "0"}
    await set_settings(page, hasProbabilities=True, values=values)
    await ask(page, QUESTION)
    await page.until("/tokens.s/.test(document.querySelector('.answer')?.innerText)")
    await take(page, folder, "page-chat-running")
    await page.until("document.querySelector('.answer[aria-busy=false]')", timeout_s=300)
    await page.click("button[aria-label='Token probabilities']")
    await page.evaluate("document.querySelectorAll('[data-token]')[12].focus()")
    await take(page, folder, "page-chat")
    await page.click("button[aria-label='Settings']")
    await page.until("document.querySelector('.settings')")
    await take(page, folder, "page-settings")


async def operate(page: Page, folder: Folder) -> None:
    """Take the views for operators."""
    await go(page, "live", ".live-charts")
    await asyncio.sleep(LIVE_S)
    await take(page, folder, "page-live", pointer=(790, 540))
    await go(page, "request", ".recent tbody tr")
    await take(page, folder, "page-requests")
    await page.click(".recent tbody a")
    await page.until("document.querySelector('.waterfall')", timeout_s=300)
    await take(page, folder, "page-request")
    await go(page, "what-if", ".preset")
    for name in PRESETS:
        buttons = "[...document.querySelectorAll('.preset')]"
        await page.evaluate(f"{buttons}.find((one) => one.innerText === {name!r}).click()")
    await take(page, folder, "page-what-if")
    await page.click(".what-if-head .primary")
    await page.until("document.querySelector('.what-if-results')", timeout_s=300)
    scroll = "document.querySelector('.what-if-results').scrollIntoView()"
    await take(page, folder, "page-what-if-results", script=f"{scroll}; 0")


async def make(url: str, folder: Folder, browser: str) -> None:
    """Take all pictures."""
    async with open_page(browser, f"{url}/") as page:
        await chat(page, folder)
        async with load(url):
            await asyncio.sleep(RUN_S)
            await operate(page, folder)


def main() -> None:
    """Take the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("folder", type=Path, help="such as docs/images")
    parser.add_argument(
        "--all", action="store_true", help="also pictures that the docs do not show"
    )
    args = parser.parse_args()
    program = find_chromium()
    if program is None:
        parser.error("there is no Chromium")
    args.folder.mkdir(parents=True, exist_ok=True)
    with running_chromium(program) as browser:
        asyncio.run(make(args.url.rstrip("/"), Folder(args.folder, args.all), browser))


if __name__ == "__main__":
    main()
