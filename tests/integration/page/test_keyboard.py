"""Every control of every view is reached by Tab, shows that it has the focus, and does its work."""

import pytest

from tests.browser import Page
from tests.integration.page.chat_page import ask, button, until_answered
from tests.integration.page.live_page import live_ring, until_live
from tests.integration.page.page_session import in_browser
from tests.integration.page.request_page import StoryRing
from tests.integration.page.what_if_page import ASK, simulate
from tests.unit.http.measured_ring import MeasuredRing
from tests.unit.scripted_ring import ScriptedRing

MARK = """(() => {
    const all = 'a[href], button, input, select, textarea, summary, [tabindex="0"]';
    const groups = new Set();
    const can = (one) => {
        if (one.disabled || one.hidden || one.tabIndex < 0 || !one.checkVisibility()) return false;
        if (one.type !== 'radio') return true;
        return one.checked;  // arrow keys go to the others of its group
    };
    const found = [...document.querySelectorAll(all)].filter(can);
    found.forEach((one, index) => (one.dataset.place = index));
    document.activeElement.blur();
    return found.map((one) => `${one.tagName} ${one.ariaLabel ?? ''} ${one.innerText ?? ''}`);
})()"""
FOCUSED = """(() => {
    const one = document.activeElement, style = (element) => element && getComputedStyle(element);
    const outlined = [one, one.nextElementSibling].some((it) => it && style(it).outlineStyle !== 'none');
    return [Number(one.dataset.place ?? -1), outlined || Boolean(one.closest('.composer-box'))];
})()"""  # noqa: E501


async def check_tabs(page: Page) -> None:
    """Assert that Tab reaches all controls, and that each shows it."""
    names = await page.evaluate(MARK)
    reached, unseen = set(), []
    for _ in range(2 * len(names) + 4):
        await page.press("Tab")
        place, is_seen = await page.evaluate(FOCUSED)
        reached.add(place)
        if place >= 0 and not is_seen:
            unseen.append(names[place])
        if len(reached - {-1}) == len(names):
            break
    assert len(names) > 8
    missed = [name for place, name in enumerate(names) if place not in reached]
    assert not missed, f"Tab does not reach {missed}"
    assert not unseen, f"no outline shows the focus of {unseen}"


TRAP = "addEventListener('keydown', (event) => event.key === 'Tab' && event.preventDefault())"
UNSEEN = "document.querySelectorAll('.topbar a').forEach((one) => (one.style.outline = 'none'))"


@pytest.mark.parametrize(("script", "reason"), [(TRAP, "does not reach"), (UNSEEN, "no outline")])
def test_a_trap_and_a_focus_that_is_not_shown_are_found(
    chromium: str, script: str, reason: str
) -> None:
    async def test(page: Page) -> None:
        await page.until("document.querySelector('.welcome li button')")
        await page.evaluate(f"{script}; true")
        with pytest.raises(AssertionError, match=reason):
            await check_tabs(page)

    in_browser(chromium, ScriptedRing(["x"]), test)


def test_tab_reaches_the_chat(chromium: str) -> None:
    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await until_answered(page)
        await page.click(button("Settings"))
        await page.until("document.querySelector('.settings')")
        await check_tabs(page)

    in_browser(chromium, ScriptedRing(["an answer\n\n```\ncode\n```\n"]), test)


def test_tab_reaches_the_choice_of_a_model(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.until("document.querySelector('.chat-head select')")
        await check_tabs(page)

    in_browser(chromium, {"a": ScriptedRing(["x"]), "b": ScriptedRing(["x"])}, test)


def test_tab_reaches_the_live_view(chromium: str) -> None:
    async def test(page: Page) -> None:
        await until_live(page)
        await check_tabs(page)

    in_browser(chromium, live_ring(), test, at="/#/live")


@pytest.mark.parametrize("name", ["", "load-1"])
def test_tab_reaches_the_requests_and_enter_opens_one(chromium: str, name: str) -> None:
    async def test(page: Page) -> None:
        await page.evaluate(
            "fetch('v1/completions', {method: 'POST', body: '{\"prompt\": \"a\"}', headers:"
            " {'Content-Type': 'application/json', 'X-Request-Id': 'load-1'}}).then(() => true)"
        )
        await page.evaluate(f"location.hash = '#/request/{name}'")
        await page.until("document.querySelector('.recent tbody a, .waterfall')")
        await check_tabs(page)
        if not name:
            await page.evaluate("document.querySelector('.recent tbody a').focus()")
            await page.press("Enter")
        await page.until("document.querySelector('.waterfall')")

    in_browser(chromium, StoryRing(["an answer"]), test, at="/#/request")


def test_tab_reaches_what_if_and_enter_takes_a_preset(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.evaluate(ASK)
        await page.until("document.querySelector('.preset')")
        await page.evaluate("document.querySelector('.preset').focus()")
        await page.press("Enter")
        await page.until("document.querySelector('.preset').disabled")
        await page.evaluate(
            "document.querySelectorAll('thead .icon-button').forEach((x) => x.click())"
        )
        await check_tabs(page)

    in_browser(chromium, MeasuredRing(), test, at="/#/what-if")


def test_tab_reaches_what_was_simulated(chromium: str) -> None:
    async def test(page: Page) -> None:
        await simulate(page)
        await check_tabs(page)

    in_browser(chromium, MeasuredRing(), test, at="/#/what-if")
