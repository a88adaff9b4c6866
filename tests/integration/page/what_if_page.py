"""What a user does in the view "what if"."""

from tests.browser import Page

SIMULATE = ".what-if-head .button.primary"
ASK = """Promise.all([1, 2, 3].map(() => fetch('v1/completions', {method: 'POST',
    headers: {'Content-Type': 'application/json'}, body: '{"prompt": "a"}'}).then((r) => r.text())))
    .then(() => true)"""


async def focus(page: Page, label: str) -> None:
    one = f"document.querySelector('[aria-label=\"{label}\"]')"
    await page.until(f"({one}.focus(), document.activeElement === {one})")


async def simulate(page: Page) -> None:
    """Have requests answered, set two variants by keys, and simulate."""
    await page.evaluate(ASK)
    await page.until(f"document.querySelector({SIMULATE!r})?.disabled === false")
    await focus(page, "max_running_requests of variant A")
    await page.type("1")
    await page.click(".what-if-table thead .button")
    await focus(page, "dp of variant B")
    await page.type("2")
    await page.click(SIMULATE)
    await page.until("document.querySelector('.what-if-results')")
