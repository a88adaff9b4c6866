"""Answers that try to run scripts, to load something, or to lead elsewhere."""

import json

import pytest

from tests.browser import Page
from tests.integration.page.chat_page import ask, until_answered
from tests.integration.page.page_ring import THINKING
from tests.integration.page.page_session import in_browser
from tests.unit.scripted_ring import ScriptedRing

HOSTILE = [
    "<script>window.isHit = true</script>",
    "<img src=x onerror='window.isHit = true'>",
    "<img src=https://evil.example/seen.png>",
    "![x](https://evil.example/seen.png)",
    "![x](javascript:window.isHit=true)",
    "[x](javascript:window.isHit=true)",
    "[x](JaVaScRiPt&#58;window.isHit=true)",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](vbscript:msgbox)",
    "<a href='javascript:window.isHit=true' id=x>x</a>",
    "<svg onload='window.isHit=true'><script>window.isHit=true</script></svg>",
    "<svg><a xlink:href='javascript:window.isHit=true'><text>x</text></a></svg>",
    "<math><mtext><style><img src=x onerror=window.isHit=true></style></mtext></math>",
    "<iframe src='https://evil.example'></iframe><object data='https://evil.example'></object>",
    "<form action='https://evil.example'><button>x</button></form>",
    "<style>@import 'https://evil.example/x.css';</style>",
    "<b onclick='window.isHit=true' style='background:url(https://evil.example)'>x</b>",
    "<b onmouseover=window.isHit=true>x</b>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<base href='https://evil.example/'>",
    "```html\n<img src=x onerror='window.isHit = true'>\n```",
    '```"><img src=x onerror=window.isHit=true>\nx\n```',
    "| a |\n|---|\n| <img src=x onerror=window.isHit=true> |",
    "<http://evil.example/\"onmouseover=window.isHit=true>",
    "[x]: javascript:window.isHit=true\n\n[x]",
]  # fmt: skip
FORBIDDEN = (
    ".answer :is(script, img, svg, math, iframe, object, form, input, style, link, base, [style])"
)


@pytest.mark.parametrize("as_reasoning", [False, True])
def test_no_answer_runs_a_script_or_loads_anything(chromium: str, as_reasoning: bool) -> None:
    text = "\n\n".join(HOSTILE)
    ring = ScriptedRing([text])
    if as_reasoning:
        ring.facts["answer_format"] = THINKING
        ring.pieces = [f"<think>\n{text}\n</think>\n\nx"]

    async def test(page: Page) -> None:
        await ask(page, "Attack")
        await until_answered(page)
        inside = ".answer .markdown"
        assert await page.evaluate(f"document.querySelectorAll('{inside} p').length") > 5
        tools = "button, button *, .answer-tools *"
        found = await page.evaluate(
            f"[...document.querySelectorAll({json.dumps(FORBIDDEN)})]"
            f".filter((one) => !one.matches('{tools}')).map((one) => one.outerHTML)"
        )
        assert found == []
        attributes = await page.evaluate(
            "[...document.querySelectorAll('.answer .markdown *')]"
            ".flatMap((one) => one.getAttributeNames()).filter((name) => name.startsWith('on'))"
        )
        assert attributes == []
        links = await page.evaluate(
            "[...document.querySelectorAll('.answer .markdown a[href]')]"
            ".map((one) => [new URL(one.href).protocol, one.target, one.rel])"
        )
        assert links
        assert {protocol for protocol, _, _ in links} <= {"http:", "https:"}
        assert all("noopener" in rel and target == "_blank" for _, target, rel in links)
        assert not await page.evaluate("window.isHit")

    in_browser(chromium, ring, test)


def test_html_of_an_answer_is_shown_as_text(chromium: str) -> None:
    async def test(page: Page) -> None:
        await ask(page, "Write HTML")
        await until_answered(page)
        text = await page.evaluate("document.querySelector('.answer .markdown').innerText")
        assert "<div class=note>" in text and "H2O" in text.replace("\n", "")

    in_browser(chromium, ScriptedRing(["H<sub>2</sub>O <div class=note>x</div>"]), test)
