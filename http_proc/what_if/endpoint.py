"""GET and POST /v1/what_if: what would have happened with other flags."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.endpoints.endpoint import Endpoint, post
from http_proc.endpoints.operator import check_operator
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, Gateway
from http_proc.protocol.errors import ApiError, from_ring, invalid
from http_proc.protocol.schema import RequestBody
from http_proc.responses import json_response
from http_proc.what_if.flags import (
    WhatIfFlag,
    config_as_it_was,
    offered_flags,
    simulator_flags,
    with_flags,
)
from http_proc.what_if.recent import MAX_CHOICES, MAX_TOKENS
from http_proc.what_if.simulation import SimulationProcess
from quadriga import clock
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.what_if import MAX_VARIANTS, FlagVariant, WhatIfAnswer, WhatIfJob

SIMULATION = web.AppKey("simulation", SimulationProcess)
MAX_LAST_S, DEFAULT_LAST_S = 86_400.0, 600.0
MAX_NAME_CHARS = 40


class WhatIfVariant(RequestBody):
    """A column. flags: names of server flags, and the values that they have in it."""

    name: str
    flags: dict[str, Any] = msgspec.field(default_factory=dict)


class WhatIfRequest(RequestBody):
    """POST /v1/what_if. last_s: the requests that arrived in so many seconds until now."""

    variants: list[WhatIfVariant] = msgspec.field(default_factory=list)
    last_s: float = DEFAULT_LAST_S


class WhatIfLoad(msgspec.Struct):
    """What can be simulated.

    num_choices: choices that have ended. seconds: since the first of them arrived. max_choices,
    max_generated_tokens: the bounds of a simulation. flags: those that a variant may change.
    """

    num_choices: int
    seconds: float
    max_choices: int
    max_generated_tokens: int
    flags: list[WhatIfFlag]


def add_what_if(app: web.Application) -> None:
    """Give the application its simulation, which ends with it."""
    simulation = app[SIMULATION] = SimulationProcess()

    async def close(_: web.Application) -> None:
        simulation.end()

    app.on_shutdown.append(close)


async def what_if_load(request: web.Request) -> web.Response:
    """Say which requests are there to be simulated, and which flags can be others."""
    check_operator(request, "the load is that of")
    gateway = request.app[GATEWAY]
    choices = gateway.recent.since(0.0)
    config, _ = await _as_it_was(gateway)
    seconds = clock.now() - choices[0].received_at if choices else 0.0
    return json_response(
        WhatIfLoad(len(choices), seconds, MAX_CHOICES, MAX_TOKENS, offered_flags(config))
    )


async def what_if(request: web.Request) -> web.Response:
    """Simulate the last minutes with the server's flags, and with those of each variant."""
    check_operator(request, "the load is that of")
    call = convert(await read_object(request), WhatIfRequest)
    _check(call)
    gateway = request.app[GATEWAY]
    choices = gateway.recent.since(clock.now() - call.last_s)
    if not choices:
        raise ApiError(
            409,
            f"no request by HTTP that arrived in the last {call.last_s:g} s has been answered: send"
            " some first, or give a larger last_s",
            param="last_s",
            code="nothing_recorded",
        )
    config, info = await _as_it_was(gateway)
    job = WhatIfJob(
        choices=choices,
        flags=simulator_flags(config),
        variants=[_variant(config, place, one) for place, one in enumerate(call.variants)],
        context_length=info["context_length"],
        device=info["device"],
    )
    answer = await request.app[SIMULATION].run(job)
    return web.Response(body=answer, content_type="application/json")


async def _as_it_was(gateway: Gateway) -> tuple[ServerConfig, dict[str, Any]]:
    try:
        info = await gateway.ring_info.current()
    except QuadrigaError as error:
        raise from_ring(error, {}) from None
    if "pages_total" not in info:
        raise ApiError(
            503, "the worker is not ready: try again when /readyz answers 200", "server_error"
        )
    return config_as_it_was(gateway.config, info), info


def _check(call: WhatIfRequest) -> None:
    if not 0 < call.last_s <= MAX_LAST_S:
        raise invalid(f"last_s is {call.last_s}: give 1 to {MAX_LAST_S:g} seconds", "last_s")
    if len(call.variants) > MAX_VARIANTS:
        raise invalid(
            f"variants has {len(call.variants)}: at most {MAX_VARIANTS} are simulated", "variants"
        )
    names = [variant.name for variant in call.variants]
    for place, name in enumerate(names):
        field = f"variants[{place}].name"
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise invalid(f"{field} has {len(name)} characters: give 1 to {MAX_NAME_CHARS}", field)
        if name in names[:place]:
            raise invalid(f"{field}: two variants are called {name!r}", field)


def _variant(config: ServerConfig, place: int, variant: WhatIfVariant) -> FlagVariant:
    try:
        flags = simulator_flags(with_flags(config, variant.flags))
    except ConfigError as error:
        field = f"variants[{place}].flags"
        raise invalid(f"{field}: {error}", field) from None
    return FlagVariant(variant.name, flags)


WHAT_IF_ENDPOINTS = [
    Endpoint("/v1/what_if", what_if_load, "The load and the flags that can be simulated",
             WhatIfLoad),
    post("/v1/what_if", what_if, "The last minutes with other flags, beside what happened",
         WhatIfRequest, WhatIfAnswer),
]  # fmt: skip
