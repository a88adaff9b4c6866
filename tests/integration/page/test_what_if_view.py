"""The view "what if" in a browser: variants, figures beside what happened, errors, widths."""

from http_proc.page.what_if import OFFERED
from tests.browser import Page
from tests.integration.page.chat_page import text_of, until_text
from tests.integration.page.page_session import in_browser
from tests.integration.page.what_if_page import ASK, SIMULATE, focus, simulate
from tests.unit.http.measured_ring import MeasuredRing

AT = "/#/what-if"


def test_variants_are_simulated_beside_what_happened_also_on_a_phone(chromium: str) -> None:
    async def test(page: Page) -> None:
        await until_text(page, ".what-if-about", "No request by HTTP has been answered yet")
        await simulate(page)
        heads = await text_of(page, ".what-if-results thead")
        for name in ("measured", "as it was", "variant A", "--max-running-requests 1", "--dp 2"):
            assert name in heads
        assert "it takes 20 at least" in await text_of(page, ".what-if-results .error-text")
        rows = await text_of(page, ".what-if-results tbody")
        assert "Time to first token, median" in rows and "1.01 s" in rows
        await page.evaluate("location.hash = '#/live'")
        await page.until("document.querySelector('.live')")
        await page.evaluate("location.hash = '#/what-if'")
        await page.until("document.querySelector('.what-if-results')")  # it is still there
        await page.resize(320, 700, is_phone=True)
        widest = "Math.max(document.documentElement.scrollWidth, document.querySelector('.what-if').scrollWidth)"  # noqa: E501
        assert await page.evaluate(widest) <= 320

    in_browser(chromium, MeasuredRing(), test, at=AT)


def test_a_value_that_cannot_be_is_an_error_in_the_page(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.evaluate(ASK)
        await page.until(f"document.querySelector({SIMULATE!r})?.disabled === false")
        await focus(page, "dp of variant A")
        await page.type("1000")
        await page.click(SIMULATE)
        await until_text(page, "[role=alert]", "a simulation takes at most 64")

    in_browser(chromium, MeasuredRing(), test, at=AT, may_complain=True)


def test_a_preset_is_a_variant_with_its_name_until_its_flags_are_others(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.evaluate(ASK)
        await page.until("document.querySelectorAll('.preset').length > 4")
        presets = "[...document.querySelectorAll('.preset')]"
        for name in ("fewer streams at once", "no prefix cache"):
            await page.evaluate(f"{presets}.find((one) => one.innerText === {name!r}).click()")
        heads = await text_of(page, ".what-if-table thead")
        assert "fewer streams at once" in heads and "no prefix cache" in heads
        names = f"{presets}.filter((one) => one.disabled).map((one) => one.innerText)"
        assert await page.evaluate(names) == ["fewer streams at once", "no prefix cache"]
        await page.click(SIMULATE)
        await page.until("document.querySelector('.what-if-results')")
        assert "no prefix cache" in await text_of(page, ".what-if-results thead")
        await focus(page, "dp of no prefix cache")
        await page.type("2")
        await until_text(page, ".what-if-table thead", "variant B")

    in_browser(chromium, MeasuredRing(), test, at=AT)


def test_every_flag_has_the_help_of_the_command_line_and_no_word_is_broken(chromium: str) -> None:
    async def test(page: Page) -> None:
        await page.evaluate(ASK)
        await until_text(page, ".what-if-table", "requests that hold a slot at the same time")
        helps = await page.evaluate(
            "[...document.querySelectorAll('.what-if-table small')].map((one) => one.innerText)"
        )
        assert len(helps) == len(OFFERED) and all(helps)
        width = "document.querySelector('.what-if-table').offsetWidth"
        assert await page.evaluate(width) > 0.95 * 1240

    in_browser(chromium, MeasuredRing(), test, at=AT)
