"""`quadriga models list`, `load` and `unload`: the models of a server that runs, by HTTP."""

import argparse
import json
import time
from typing import Any

from quadriga.errors import ConfigError, ServerFailed
from quadriga.server.cli import shared
from quadriga.server.cli.server_api import DEFAULT_URL, CallRefused, ServerApi
from quadriga.wire.client import DEFAULT_ENDPOINT

POLL_S = 0.2
# Seconds until a load that has failed before has begun again.
BEGIN_S = 5.0
# Of one request that waits for a busy model: less than the time limit of a request.
WAIT_S = 20.0
BUSY = 409


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers of `quadriga models`."""
    listing = commands.add_parser(
        "list",
        help="the models of a running server, and whether they are loaded",
        description="List the models of a running server, and whether they are loaded.",
        allow_abbrev=False,
    )
    loading = commands.add_parser(
        "load",
        help="load a model of a running server",
        description="Load a model of a running server as soon as there is room, and wait for that.",
        allow_abbrev=False,
    )
    unloading = commands.add_parser(
        "unload",
        help="unload a model of a running server",
        description="Unload a model of a running server. One with open requests is left as it is,"
        " unless --wait says how long to wait for their end.",
        allow_abbrev=False,
    )
    unloading.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="seconds to wait for its requests"
    )
    for parser, run in ((listing, _list), (loading, _load), (unloading, _unload)):
        if parser is not listing:
            parser.add_argument("name", help="name or alias of the model")
        shared.add_server(parser, default=argparse.SUPPRESS)
        parser.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
        )
        parser.set_defaults(run_models=run)


def _api(arguments: argparse.Namespace) -> ServerApi:
    endpoint = arguments.endpoint
    if not shared.is_web_address(endpoint):
        if endpoint != DEFAULT_ENDPOINT:
            raise ConfigError(
                f"--endpoint is {endpoint}: models are listed, loaded and unloaded by HTTP; give"
                f" the web address of the server, such as {DEFAULT_URL}"
            )
        endpoint = DEFAULT_URL
    return ServerApi(endpoint, arguments.api_key)


def _list(arguments: argparse.Namespace) -> None:
    models = _api(arguments).model_states()
    if arguments.json:
        print(json.dumps(models, indent=1))
        return
    rows = [("name", "state", "aliases"), *((m["id"], state_of(m), _aliases(m)) for m in models)]
    shared.print_table(rows)


def state_of(model: dict[str, Any]) -> str:
    """Return the state of a model of GET /models."""
    return str(model["status"]["value"])


def _aliases(model: dict[str, Any]) -> str:
    shares = (model.get("canaries") or {}).items()
    return ", ".join([*model["aliases"], *(f"{name} ({share:.1%})" for name, share in shares)])


def _load(arguments: argparse.Namespace) -> None:
    api, name = _api(arguments), arguments.name
    has_begun, began_at = api.state(name) != "failed", time.monotonic()
    api.load(name)
    while (state := api.state(name)) != "loaded":
        has_begun = has_begun or state != "failed" or time.monotonic() - began_at > BEGIN_S
        if state == "lost" or (has_begun and state == "failed"):
            raise ServerFailed(f"model {name} could not be loaded: the server's log says why")
        time.sleep(POLL_S)
    _say(arguments, name, "loaded")


def _unload(arguments: argparse.Namespace) -> None:
    api, ends_at = _api(arguments), time.monotonic() + arguments.wait
    while True:
        left_s = max(0.0, ends_at - time.monotonic())
        try:
            api.unload(arguments.name, round(min(left_s, WAIT_S)))
            break
        except CallRefused as error:
            if error.status != BUSY or not left_s:
                raise
    _say(arguments, arguments.name, "unloaded")


def _say(arguments: argparse.Namespace, name: str, state: str) -> None:
    print(json.dumps({"id": name, "state": state}) if arguments.json else f"{name} is {state}")
