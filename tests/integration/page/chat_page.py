"""What a user does in the chat of the page."""

import json
from typing import Any

from tests.browser import Page

MESSAGE = "textarea[aria-label='Message']"
OPEN = ".answer[aria-busy=true]"
ENDED = ".answer[aria-busy=false]"


def button(label: str) -> str:
    """Return the selector of a button."""
    return f"button[aria-label={json.dumps(label)}]"


async def ask(page: Page, text: str) -> None:
    """Send a message."""
    await page.click(MESSAGE)
    await page.type(text)
    await page.press("Enter")


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


async def set_settings(page: Page, **changes: Any) -> None:
    """Begin with these settings, as if the last conversation had had them."""
    await page.until(f"document.querySelector({MESSAGE!r})")
    await page.evaluate(
        "localStorage.setItem('quadriga.chat.settings', JSON.stringify({"
        "...JSON.parse(localStorage.getItem('quadriga.chat.settings')),"
        f"...{json.dumps(changes)}}}))"
    )
    await page.reload()
