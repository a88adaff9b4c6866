"""GET /: what is served here and where to go on, as JSON; with --no-ui for browsers as a list."""

import html
from pathlib import Path
from string import Template

import msgspec
from aiohttp import web

from http_proc.gateway import GATEWAY
from http_proc.responses import json_response
from http_proc.ui.page import policy_of_inline

HTML = Path(__file__).with_name("landing.html").read_text(encoding="utf-8")
PAGE, POLICY = Template(HTML), policy_of_inline(HTML)


class LandingAnswer(msgspec.Struct):
    """The model that is served, and the paths of the OpenAI API and of the other entrances."""

    model: str
    openai: str = "/v1"
    docs: str = "/docs"
    openapi: str = "/openapi.json"
    health: str = "/health"
    server_info: str = "/server_info"
    metrics: str = "/metrics"


async def landing(request: web.Request) -> web.Response:
    """Return the list if the client accepts HTML, as browsers do; http_proc/ui comes before.

    Clients of Ollama probe a server by this path, and read a text.
    """
    if "ollama" in request.headers.get("User-Agent", "").lower():
        return web.Response(text="Ollama is running")
    model = request.app[GATEWAY].model
    if "text/html" in request.headers.get("Accept", ""):
        text = PAGE.substitute(model=html.escape(model))
        policy = {"Content-Security-Policy": POLICY}
        response = web.Response(text=text, content_type="text/html", headers=policy)
    else:
        response = json_response(LandingAnswer(model))
    response.headers["Vary"] = "Accept"
    return response
