"""The page at /: who gets it, its headers, and what a browser may keep."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from http_proc.page.pages import BUNDLE
from tests.unit.scripted_ring import ScriptedRing, gateway_before

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
Asking = Callable[[aiohttp.ClientSession], Awaitable[None]]


def at_gateway(ask: Asking, **flags: Any) -> None:
    """Run `ask` with a session whose base is a gateway."""

    async def run() -> None:
        async with (
            gateway_before(ScriptedRing(["x"]), **flags) as (url, _),
            aiohttp.ClientSession(url) as session,
        ):
            await ask(session)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_browser_gets_the_page_and_its_files() -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get("/", headers=BROWSER) as response:
            assert response.content_type == "text/html"
            assert await response.read() == (BUNDLE / "index.html").read_bytes()
        kinds = {"app.js": "text/javascript", "app.css": "text/css", "icon.svg": "image/svg+xml"}
        for name, kind in kinds.items():
            async with session.get(f"/ui/{name}") as response:
                assert response.content_type == kind
                assert await response.read() == (BUNDLE / name).read_bytes()

    at_gateway(ask)


def test_scripts_of_other_origins_and_scripts_in_the_page_are_forbidden() -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        for path in ("/", "/ui/app.js"):
            async with session.get(path, headers=BROWSER) as response:
                policy = dict(
                    rule.split(" ", 1)
                    for rule in response.headers["Content-Security-Policy"].split("; ")
                )
                assert policy["default-src"] == "'none'"
                assert policy["script-src"] == policy["style-src"] == "'self'"
                assert policy["connect-src"] == "'self'"
                assert policy["frame-ancestors"] == "'none'"
                assert response.headers["X-Content-Type-Options"] == "nosniff"

    at_gateway(ask)


def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get("/ui/app.js") as response:
            tag = response.headers["ETag"]
            assert response.headers["Cache-Control"] == "no-cache"
        async with session.get("/ui/app.js", headers={"If-None-Match": tag}) as response:
            assert (response.status, await response.read()) == (304, b"")
        async with session.get("/ui/app.js", headers={"If-None-Match": '"another"'}) as response:
            assert response.status == 200

    at_gateway(ask)


def test_files_are_sent_compressed_to_those_who_take_it() -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get("/ui/app.js", headers={"Accept-Encoding": "br, gzip"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            packed = int(response.headers["Content-Length"])
        async with session.get("/ui/app.js", headers={"Accept-Encoding": "identity"}) as response:
            assert "Content-Encoding" not in response.headers
            assert packed < int(response.headers["Content-Length"]) / 2

    at_gateway(ask)


def test_the_page_needs_no_key_and_the_api_does() -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        for path, headers, status in [
            ("/", BROWSER, 200),
            ("/ui/app.js", {}, 200),
            ("/", {"Accept": "application/json"}, 401),
            ("/v1/models", BROWSER, 401),
            ("/ui/none", {}, 401),
        ]:
            async with session.get(path, headers=headers) as response:
                assert response.status == status, path

    at_gateway(ask, api_key="secret")


def test_a_head_request_gets_the_headers_alone() -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.head("/", headers=BROWSER) as response:
            assert response.status == 200
            assert await response.read() == b""

    at_gateway(ask)


@pytest.mark.parametrize("path", ["/ui/", "/ui/none.js", "/ui/../page.py", "/ui/%2e%2e/page.py"])
def test_a_name_that_is_no_file_of_the_bundle_is_a_404(path: str) -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get(path) as response:
            assert response.status == 404

    at_gateway(ask)


def test_no_ui_leaves_out_the_page_and_its_files() -> None:
    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.get("/ui/app.js") as response:
            assert response.status == 404
        async with session.get("/", headers=BROWSER) as response:
            assert "app.js" not in await response.text()

    at_gateway(ask, no_ui=True)
