"""Serve the pages for browsers: the page at / with its files at /ui/…, and the list of --no-ui.

They need no key, for they hold no data of the server: the page calls the same API as every other
client, with the key that its user enters.
"""

import base64
import gzip
import hashlib
import html
import mimetypes
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from http_proc.web.exchange import GATEWAY, json_response

# Serve the page at / and its files at /ui/…, without a key: they hold no data of the server.
#
# The page calls the same API as every other client, with the key that its user enters.

BUNDLE = Path(__file__).with_name("bundle")
PREFIX = "/ui/"
INDEX = "index.html"

# Scripts, styles and data come from this server alone, no script stands in a page, and no text
# becomes HTML before the sanitiser has seen it.
CONTENT_SECURITY_POLICY = "; ".join([
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types dompurify",
])  # fmt: skip
HEADERS = {
    "Cache-Control": "no-cache",  # a browser asks each time, and gets a 304 while nothing changed
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def policy_of_inline(html: str) -> str:
    """Return the Content-Security-Policy of a page whose script and style stand in it."""
    sources = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
               "frame-ancestors 'none'"]  # fmt: skip
    for tag in ("script", "style"):
        digests = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for text in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        ]
        allowed = [f"'sha256-{digest}'" for digest in digests] or ["'none'"]
        sources.append(f"{tag}-src {' '.join(allowed)}")
    return "; ".join(sources)


class PageFile(NamedTuple):
    """A file of the bundle.

    Attributes:
        content_type: its media type, with the charset.
        tag: its entity tag, quoted.
    """

    body: bytes
    packed: bytes
    content_type: str
    tag: str


def read_bundle() -> dict[str, PageFile]:
    """Return the files of the bundle by name."""
    return {path.name: _read(path) for path in sorted(BUNDLE.iterdir())}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    return PageFile(body, gzip.compress(body, 9, mtime=0), f"{kind}; charset=utf-8", tag)


def serve_page() -> Middleware:
    """Return a middleware that answers requests for the page, before keys are checked."""
    files = read_bundle()

    @web.middleware
    async def serve(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = _name(request)
        if name is None or (file := files.get(name)) is None:
            return await handler(request)
        return _answer(request, file)

    return serve


def _name(request: web.Request) -> str | None:
    """Return the file that a request is for; None: the request is not for the page."""
    if request.method not in ("GET", "HEAD"):
        return None
    if request.path == "/":
        return INDEX if "text/html" in request.headers.get("Accept", "") else None
    return request.path.removeprefix(PREFIX) if request.path.startswith(PREFIX) else None


def _answer(request: web.Request, file: PageFile) -> web.Response:
    headers = HEADERS | {
        "ETag": file.tag, "Content-Type": file.content_type, "Vary": "Accept, Accept-Encoding",
    }  # fmt: skip
    if file.tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=file.packed, headers=headers | {"Content-Encoding": "gzip"})
    return web.Response(body=file.body, headers=headers)


# GET /: what is served here and where to go on, as JSON; with --no-ui for browsers as a list.

HTML = Path(__file__).with_name("landing.html").read_text(encoding="utf-8")
PAGE, POLICY = Template(HTML), policy_of_inline(HTML)


class LandingAnswer(msgspec.Struct):
    """The default model, and the paths of the OpenAI API and of the other entrances.

    models: the names of all, of a server with several.
    """

    model: str
    openai: str = "/v1"
    docs: str = "/docs"
    openapi: str = "/openapi.json"
    health: str = "/health"
    server_info: str = "/server_info"
    metrics: str = "/metrics"
    models: list[str] | msgspec.UnsetType = msgspec.UNSET


async def landing(request: web.Request) -> web.Response:
    """Return the list if the client accepts HTML, as browsers do; http_proc/ui comes before.

    Clients of Ollama probe a server by this path, and read a text.
    """
    if "ollama" in request.headers.get("User-Agent", "").lower():
        return web.Response(text="Ollama is running")
    names = [model.name for model in request.app[GATEWAY].models]
    if "text/html" in request.headers.get("Accept", ""):
        text = PAGE.substitute(model=html.escape(", ".join(names)))
        policy = {"Content-Security-Policy": POLICY}
        response = web.Response(text=text, content_type="text/html", headers=policy)
    else:
        response = json_response(
            LandingAnswer(names[0], models=names if len(names) > 1 else msgspec.UNSET)
        )
    response.headers["Vary"] = "Accept"
    return response
