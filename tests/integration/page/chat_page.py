"""What a user does in the chat of the page."""

import asyncio
import json
from typing import Any

from tests.browser import Page

MESSAGE = "textarea[aria-label='Message']"
OPEN = ".answer[aria-busy=true]"
ENDED = ".answer[aria-busy=false]"
RECORDS = """new Promise((found, failed) => {
    const opening = indexedDB.open('quadriga');
    opening.onerror = failed;
    opening.onsuccess = () => {
        const store = opening.result.transaction('conversations').objectStore('conversations');
        store.getAll().onsuccess = ({ target }) => { opening.result.close(); found(target.result) };
    };
})"""


def button(label: str) -> str:
    """Return the selector of a button."""
    return f"button[aria-label={json.dumps(label)}]"


async def ask(page: Page, text: str) -> None:
    """Send a message."""
    await page.click(MESSAGE)
    await page.type(text)
    await page.press("Enter")


async def follow_and_send(page: Page, link: str) -> None:
    """Follow a link and send the text of the field before the browser reports the new address."""
    found = f"document.querySelector({json.dumps(link)})"
    await page.until(found)
    await page.evaluate(f"{found}.click(); document.querySelector('form.composer').requestSubmit()")


async def until_answered(page: Page, num: int = 1) -> None:
    """Wait until so many answers are shown, and none of them is open."""
    count = f"document.querySelectorAll({ENDED!r}).length"
    await page.until(f"{count} === {num} && !document.querySelector({OPEN!r})")


async def text_of(page: Page, selector: str) -> str:
    """Return the text of the first element."""
    found: str = await page.until(f"document.querySelector({json.dumps(selector)})?.innerText")
    return found


async def until_text(page: Page, selector: str, text: str) -> None:
    """Wait until an element has a text."""
    script = f"document.querySelector({json.dumps(selector)})?.innerText.includes"
    await page.until(f"{script}({json.dumps(text)})")


async def until_saved(page: Page, question: str, answer: str, status: str = "done") -> None:
    """Wait until the browser keeps a conversation that ends with this question and answer."""
    last = [("user", question, "done"), ("assistant", answer, status)]
    while not any(last == messages[-2:] for messages in await _saved(page)):
        await asyncio.sleep(0.02)


async def _saved(page: Page) -> list[list[tuple[str, str, str]]]:
    records = await page.evaluate(RECORDS)
    return [
        [(one["role"], one["content"], one["status"]) for one in record["messages"]]
        for record in records
    ]


async def set_settings(page: Page, **changes: Any) -> None:
    """Begin with these settings, as if the last conversation had had them."""
    await page.until(f"document.querySelector({MESSAGE!r})")
    await page.evaluate(
        "localStorage.setItem('quadriga.chat.settings', JSON.stringify({"
        "...JSON.parse(localStorage.getItem('quadriga.chat.settings')),"
        f"...{json.dumps(changes)}}}))"
    )
    await page.reload()
