"""Calls of a gateway, each in a session of its own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from http_proc.core.gateway import Gateway
from quadriga.errors import ServerFailed
from quadriga.server.tenants import hash_of_key
from tests.unit.scripted_ring import ScriptedRing, run_at_gateway


@dataclass
class Answer:
    """A response: its status, headers and text."""

    status: int
    headers: Any
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


async def send(
    gateway: Gateway,
    path: str,
    body: Any = None,
    method: str = "",
    fails: bool = False,
    /,
    **headers: str,
) -> Answer:
    """Send a request, which is a POST where it has a body.

    Args:
        gateway: the gateway, in front of a scripted ring.
        path: the path, with a query if there is one.
        body: the JSON value of the body.
        method: another method.
        fails: let the ring fail after the first line of the answer.
        headers: headers by their names, in which "_" is for "-".
    """
    method = method or ("GET" if body is None else "POST")
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, gateway.args.url + path, json=body, headers=names) as response,
    ):
        first = b""
        if fails:
            first = await response.content.readline()
            gateway.models.default.client.sinks[0](ServerFailed("worker_proc died"))  # type: ignore[attr-defined]
        return Answer(response.status, response.headers, first.decode() + await response.text())


def answer_of(
    ring: ScriptedRing,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    **flags: Any,
) -> Answer:
    """Return the answer of a gateway in front of a ring, which fails if it leaves requests open."""
    answers = []

    async def test(gateway: Gateway) -> None:
        answers.append(await send(gateway, path, body, "", ring.leaves_open, **headers or {}))

    run_at_gateway(ring, test, **flags)
    return answers[0]


def key_entry(name: str, key: str, more: str = "") -> str:
    """Return an entry of a key file, with lines of `more` behind it."""
    return f"- name: {name}\n  key: {hash_of_key(key.encode())}\n{more}"


def key_file(folder: Path, **keys: str) -> Path:
    """Return a key file with the keys of tenants."""
    file = folder / "keys.yaml"
    file.write_text("".join(key_entry(name, key) for name, key in keys.items()))
    return file
