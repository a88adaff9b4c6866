"""The lines that a server prints once it is ready: what it serves, where, and how to ask it."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quadriga.sampling.pooling import EMBED, LABEL, RANK
from quadriga.server.config.frontend_args import HttpArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.child_process import ChildProcess
from quadriga.server.processes.logs import TransientLine
from quadriga.wire.client import DEFAULT_ENDPOINT, PRIVATE_ENDPOINT
from quadriga.wire.sockets import IPC

CHAT_QUESTION = "Name the capital of France."
PLAIN_QUESTION = "The capital of France is"
# An endpoint, and a body for it.
CHAT = ("v1/chat/completions", {"messages": [{"role": "user", "content": CHAT_QUESTION}]})
COMPLETIONS = ("v1/completions", {"prompt": PLAIN_QUESTION})
# Of models that make no text, by ModelFiles.only_task.
ONLY_TASKS: dict[str, tuple[str, object]] = {
    EMBED: ("v1/embeddings", {"input": PLAIN_QUESTION}),
    RANK: ("rerank", {"query": "Who draws it?", "documents": ["A fox.", "Four horses."]}),
    LABEL: ("classify", {"input": "What a day!"}),
}
# Addresses of a server on all interfaces, and what a client on this machine connects to.
ALL_INTERFACES = {"//0.0.0.0:": "//127.0.0.1:", "//*:": "//127.0.0.1:", "//[::]:": "//[::1]:"}


class PhaseLine:
    """The line of a terminal that shows what a start waits for, in each process.

    Args:
        shown: whether standard error is a terminal that shows it.
    """

    def __init__(self, shown: bool) -> None:
        self._line: TransientLine | None = None
        if shown:
            # The terminal may have no name, or belong to another user.
            with suppress(OSError):
                self._line = TransientLine(os.ttyname(sys.stderr.fileno()))
        self._text = ""

    def show(self, children: Iterable[ChildProcess], now: float) -> None:
        """Show the phases that are under way, and the seconds since their begin."""
        text = "  ".join(
            f"{child.name}: {child.phase} ... {now - child.phase_began_at:.0f} s"
            for child in children
            if child.phase
        )
        if self._line is not None and text != self._text:
            self._line.show(text)
            self._text = text

    def close(self) -> None:
        """Clear the line."""
        if self._line is not None:
            self._line.close()


# The flags of a model that is served, and what its worker reported when it was ready; empty if no
# request has loaded the model yet.
Served = tuple[ServerConfig, dict[str, Any]]


def ready_line(served: Sequence[Served], seconds: float, endpoint: str) -> str:
    """Return the line that scripts wait for.

    Args:
        served: the models.
        seconds: duration of the start.
        endpoint: the public ZeroMQ socket, of the first model.
    """
    config, _ = served[0]
    names = [
        f"{config.model.shown_name} {worker['dtype']} {worker['device']}"
        if worker
        else f"{config.model.shown_name} on demand"
        for config, worker in served
    ]
    parts = [f"quadriga ready in {seconds:.1f} s", ", ".join(names), f"zmq {endpoint}"]
    return " · ".join(parts if config.http.no_http else [*parts, config.http.url])


def ready_fields(served: Sequence[Served], seconds: float, endpoint: str) -> dict[str, Any]:
    """Return the fields of the ready line in JSON; the arguments are those of `ready_line`."""
    config, worker = served[0]
    others = {"models": [config.model.shown_name for config, _ in served]}
    return {
        "event": "ready",
        "seconds": round(seconds, 3),
        "model": config.model.shown_name,
        **(others if len(served) > 1 else {}),
        "dtype": worker.get("dtype"),
        "device": worker.get("device"),
        "endpoint": endpoint,
        "url": None if config.http.no_http else config.http.url,
        "open": doors(config),
    }


def start_summary(name: str, model_seconds: float, worker: ChildProcess) -> str:
    """Return the phases of a start and what they made, in one line.

    Args:
        name: the model, where the server has several; "" else.
        model_seconds: time in which the models were found or fetched.
        worker: the process whose start takes longest.
    """
    phases = [f"find model {model_seconds:.1f} s", *worker.phases]
    info = worker.info
    made = [
        *([name] if name else []),
        *(phase for phase in phases if not phase.endswith(" 0.0 s")),
        f"KV pool {info.get('tokens')} tokens",
        f"{info.get('backend')} backend",
        f"{info.get('threads')} threads",
    ]
    return "  " + " · ".join(made)


def start_details(model_seconds: float, children: Iterable[ChildProcess]) -> list[str]:
    """Return the phases of every process, one line each, and the cores of the worker."""
    lines = [f"  launcher: find model {model_seconds:.1f} s"]
    for child in children:
        if child.phases:
            lines.append(f"  {child.name}: {', '.join(child.phases)}")
        if cpus := child.info.get("cpus"):
            lines.append(f"  {child.name}: CPUs {cpus} are reserved for it")
    return lines


def doors(config: ServerConfig) -> str:
    """Return which sockets clients can reach, and whether they need keys there."""
    http, frontend = config.http, config.frontend
    if http.no_http:
        parts = ["http off"]
    else:
        keys = "with keys" if config.http_needs_keys else "without keys"
        parts = [f"{urlsplit(http.url).scheme} {http.url.partition('//')[2]} {keys}"]
    if frontend.endpoint == PRIVATE_ENDPOINT:
        parts.append("zmq closed")
    elif frontend.endpoint.startswith(IPC):
        parts.append(f"zmq {frontend.endpoint.removeprefix(IPC)} for this user only")
    else:
        keys = "without keys" if frontend.is_open else "with keys"
        parts.append(f"zmq {frontend.endpoint.removeprefix('tcp://')} {keys}")
    return " · ".join(parts)


def usage_lines(
    config: ServerConfig, has_chat: bool, endpoint: str, only_task: str = ""
) -> list[str]:
    """Return which doors are open, where to find the server, and commands that ask it.

    Args:
        config: the server's flags.
        has_chat: whether the model has a chat template.
        endpoint: the public ZeroMQ socket.
        only_task: what a model does that makes no text; "": it makes text.
    """
    lines = [f"  open    {doors(config)}"]
    if not config.http.no_http:
        example = ONLY_TASKS.get(only_task) or (CHAT if has_chat else COMPLETIONS)
        lines += _http_lines(config.http, config.http_needs_keys, example)
    if only_task:
        return lines
    return [*lines, f"  ask     {_ask_command(config, has_chat, endpoint)}"]


def _http_lines(http: HttpArgs, needs_key: bool, example: tuple[str, object]) -> list[str]:
    url = _local(http.url)
    call, body = example
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    page = [] if http.no_ui else [f"  page    {url}/"]
    return [
        *page,
        f"  OpenAI  {url}/v1",
        f"  docs    {url}/docs",
        f"  curl    curl {url}/{call}{key} -d {shlex.quote(json.dumps(body))}",
    ]


def _local(url: str) -> str:
    """Return the URL for a client on this machine."""
    for wildcard, address in ALL_INTERFACES.items():
        url = url.replace(wildcard, address)
    return url


def _ask_command(config: ServerConfig, has_chat: bool, endpoint: str) -> str:
    words = [command_name(), "ask"]
    if not has_chat:
        words.append("--plain")
    if config.frontend.endpoint == PRIVATE_ENDPOINT and not config.http.no_http:
        words += ["--endpoint", _local(config.http.url)]
        words += ["--api-key", "$KEY"] if config.http_needs_keys else []
    elif _local(endpoint) != DEFAULT_ENDPOINT:
        words += ["--endpoint", _local(endpoint)]
    if config.frontend.curve_dir:
        words += ["--curve-dir", "CLIENT_KEYS"]
    return " ".join([*words, f'"{CHAT_QUESTION if has_chat else PLAIN_QUESTION}"'])


def command_name() -> str:
    """Return the shortest command that runs this environment's `quadriga` in this directory."""
    script = Path(sys.executable).parent / "quadriga"
    on_path = shutil.which("quadriga")
    if on_path and script.exists() and Path(on_path).samefile(script):
        return "quadriga"
    if script.exists():
        return min(str(script), os.path.relpath(script), key=len)
    return f"{sys.executable} -m quadriga"
