"""What axe-core finds in a page: contrast, names, roles and order. axe_core/ has its licence."""

import json
from pathlib import Path

from tests.browser import Page

AXE = Path(__file__).with_name("axe_core").joinpath("axe.min.js")
RUN = """axe.run(document, { resultTypes: ['violations'] }).then(({ violations, passes }) => ({
    passes: passes.length,
    found: violations.map(({ id, help, nodes }) => `${id}: ${help}\\n` + nodes.slice(0, 4).map(
        ({ target, any }) => `    ${target.join(' ')} ${any[0]?.message ?? ''}`).join('\\n')),
}))"""
MIN_PASSES = 10
"""Of a page that axe has looked at: fewer say that there was nothing to look at."""


async def violations(page: Page) -> list[str]:
    """Return the violations of all of axe's rules by what the page shows now."""
    if not await page.evaluate("Boolean(window.axe)"):
        await page.evaluate(f"{AXE.read_text(encoding='utf-8')}; true")
    found = await page.evaluate(RUN)
    assert found["passes"] >= MIN_PASSES, found
    return list(found["found"])


async def check_appearances(page: Page, what: str) -> None:
    """Assert that nothing is found in light and dark colours, and on a phone in both."""
    complaints = {}
    for width, is_phone in ((1280, False), (390, True)):
        await page.resize(width, 800, is_phone=is_phone)
        for scheme in ("light", "dark"):
            await page.set_colors(scheme)
            await page.until(f"document.documentElement.dataset.theme === {json.dumps(scheme)}")
            await page.until("!document.getAnimations().some((one) => one.transitionProperty)")
            if found := await violations(page):
                complaints[f"{what}, {scheme}, {width} px"] = found
    text = "\n".join(f"{where}\n  " + "\n  ".join(found) for where, found in complaints.items())
    assert not complaints, text
