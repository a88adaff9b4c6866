"""GET and POST /v1/what_if: what would have happened with other flags.

First the flags that a simulation may change, then the simulation in a process of its own, off the
way of requests, then the handlers.
"""

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import msgspec
from aiohttp import web

from http_proc.core.errors import ApiError, from_server, invalid
from http_proc.core.gateway import Key
from http_proc.core.observe import MAX_RECENT_CHOICES, MAX_RECENT_TOKENS
from http_proc.core.served_model import ServedModel
from http_proc.generation import sampling, schema
from http_proc.web import access, endpoint, exchange
from quadriga import clock
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.programs import command_of
from quadriga.server.config.flags import flag_name, kind_name
from quadriga.server.config.server_config import ServerConfig, help_text
from quadriga.wire.what_if import MAX_VARIANTS, FlagVariant, MeasuredChoice, WhatIfAnswer, WhatIfJob

# The flags that a simulation may change, and those of the server as it was.

# The flags of a variant, in the order in which the page shows them, with the largest value of each.
MAX_COUNT = 1_000_000
OFFERED: dict[str, int | None] = {
    "max_batch_size": MAX_COUNT,
    "max_running_requests": MAX_COUNT,
    "chunked_prefill_size": MAX_COUNT,
    "prefill_max_batch_size": MAX_COUNT,
    "batch_mode": None,
    "schedule_policy": None,
    "schedule_conservativeness": None,
    "max_total_tokens": 1 << 30,
    "disable_radix_cache": None,
    "dp": 64,
    "load_balance_method": None,
    "prefill_replicas": 63,
}
# These have no effect with other policies than that of the server.
OF_A_POLICY = ("priority_preemption_threshold",)
NEVER_CUT = -1


class WhatIfFlag(msgspec.Struct):
    """A flag that a variant may change. value: of the server; choices: empty for any."""

    name: str
    help: str
    kind: str
    value: bool | int | float | str | None
    choices: list[str]


def config_as_it_was(config: ServerConfig, info: Mapping[str, Any]) -> ServerConfig:
    """Return the flags of a server with the values that it has found at its start.

    Args:
        config: the flags.
        info: the info of the ring, which is ready.
    """
    replicas = info.get("replicas") or [info]
    page_size, num_pages = info["page_size"], replicas[0]["pages_total"]
    chunk, scheduler = info["chunked_prefill_size"], config.scheduler
    return config.replace(
        chunked_prefill_size=NEVER_CUT if chunk is None else chunk,
        page_size=page_size,
        max_total_tokens=num_pages * page_size,
        dp=len(replicas),
        # All requests by HTTP are of one client, so that only tenants can have turns.
        fair_clients=scheduler.fair_tenants,
        fair_tenants=False,
        journal="",
        no_journal=True,
        resume=False,
    )


def offered_flags(config: ServerConfig) -> list[WhatIfFlag]:
    """Return the flags that a variant may change, with their values in a config."""
    found = []
    for name in OFFERED:
        group, field = _field(config, name)
        kind, choices = kind_name(field.type), list(field.metadata["choices"])
        found.append(WhatIfFlag(name, help_text(field), kind, getattr(group, name), choices))
    return found


def with_flags(config: ServerConfig, flags: Mapping[str, Any]) -> ServerConfig:
    """Return a config with other flags, or raise ConfigError for one that cannot be simulated."""
    changes = {_name(given): value for given, value in flags.items()}
    for name, value in changes.items():
        _check_flag(config, name, value)
    if "schedule_policy" in changes:
        changes = dict.fromkeys(OF_A_POLICY) | changes
    changed = config.replace(**changes)
    changed.validate()
    return changed


def _name(given: str) -> str:
    name = given.lstrip("-").replace("-", "_")
    if name not in OFFERED:
        known = ", ".join(OFFERED)
        raise ConfigError(f"{given[:60]!r} is no flag that can be simulated: these are {known}")
    return name


def _check_flag(config: ServerConfig, name: str, value: Any) -> None:
    """Raise ConfigError for a value of a wrong type, or out of the range of a simulation."""
    _, field = _field(config, name)
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None
    choices, largest = field.metadata["choices"], OFFERED[name]
    if choices and value not in choices:
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")
    if largest is not None and isinstance(value, (int, float)) and value > largest:
        raise ConfigError(f"{name} is {value}: a simulation takes at most {largest}")


def _field(config: ServerConfig, name: str) -> tuple[Any, "dataclasses.Field[Any]"]:
    """Return the group of a flag, and its field."""
    return next(
        (group, field)
        for group in config.groups()
        for field in dataclasses.fields(group)
        if field.name == name
    )


def simulator_flags(config: ServerConfig) -> list[str]:
    """Return the command line of the simulator for a server with this config."""
    frontend, replicas = config.frontend, config.replicas
    simulated = ServerConfig(scheduler=config.scheduler).replace(
        page_size=config.worker.page_size,
        max_total_tokens=config.worker.max_total_tokens,
        allow_auto_truncate=frontend.allow_auto_truncate,
        queue_timeout=frontend.queue_timeout,
        request_timeout=frontend.request_timeout,
    )
    words = simulated.to_argv()
    if config.http.what_if_cost_model:
        words += ["--cost-model", config.http.what_if_cost_model]
    if replicas.dp > 1:
        method = flag_name("load_balance_method")
        words += ["--replicas", str(replicas.dp), method, replicas.load_balance_method]
    if replicas.has_roles:
        words += [flag_name("prefill_replicas"), str(replicas.prefill_replicas)]
    return words


# Run a simulation in a process of its own, off the way of requests.

MODULE = "simulator.what_if"
TIMEOUT_S = 300.0  # it has the lowest priority, so that a busy machine makes it slow
RETRY_S = 5.0
USAGE_ERROR = 2
# Each further thread of numpy's library takes address space, which is bounded.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


class SimulationProcess:
    """At most one simulation at a time."""

    def __init__(self) -> None:
        self._is_running = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, job: WhatIfJob) -> bytes:
        """Return the JSON of a WhatIfAnswer. A caller that is cancelled ends the process.

        Raises:
            ApiError: another one runs, the flags do not go together, or it takes too long.
        """
        if self._is_running:
            raise ApiError(
                429,
                f"a simulation runs: try again in {RETRY_S:g} s",
                "rate_limit_error",
                code="simulation_running",
                retry_after=RETRY_S,
            )
        self._is_running = True
        try:
            return await self._run(msgspec.json.encode(job))
        finally:
            self.end()
            self._is_running = False

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process = None

    async def _run(self, job: bytes) -> bytes:
        pipe = asyncio.subprocess.PIPE
        process = self._process = await asyncio.create_subprocess_exec(
            *command_of(MODULE), stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | ONE_THREAD
        )
        timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self.end)
        try:
            answer, complaint = await process.communicate(job)
        finally:
            timer.cancel()
        if process.returncode == 0:
            return answer
        text = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode == USAGE_ERROR:
            raise invalid(text, "variants")
        if process.returncode is not None and process.returncode < 0:
            raise ApiError(
                504,
                "the simulation took too long or too much memory: give a smaller last_s, or fewer"
                " variants",
                "timeout_error",
                code="simulation_too_long",
            )
        raise ApiError(500, f"the simulation failed: {text}", "server_error")


SIMULATION = Key[SimulationProcess]("simulation")
MAX_LAST_S, DEFAULT_LAST_S = 86_400.0, 600.0
MAX_NAME_CHARS = 40


class WhatIfVariant(schema.RequestBody):
    """A column. flags: names of server flags, and the values that they have in it."""

    name: str
    flags: dict[str, Any] = msgspec.field(default_factory=dict)


class WhatIfRequest(schema.RequestBody):
    """POST /v1/what_if. last_s: seconds until now in which the requests arrived."""

    variants: list[WhatIfVariant] = msgspec.field(default_factory=list)
    last_s: float = DEFAULT_LAST_S


class WhatIfLoad(msgspec.Struct):
    """What can be simulated.

    num_choices: choices that have ended. seconds: since the first of them arrived. most_running:
    the largest number of them that ran at the same time. max_choices,
    max_generated_tokens: the bounds of a simulation. flags: those that a variant may change.
    """

    num_choices: int
    seconds: float
    most_running: int
    max_choices: int
    max_generated_tokens: int
    flags: list[WhatIfFlag]


async def what_if_load(request: web.Request) -> web.Response:
    """Say which requests are there to be simulated, and which flags can be others."""
    access.check_operator(request, "the load is that of")
    model = exchange.model_of(request)
    choices = model.recent.since(0.0)
    config, _ = await _as_it_was(model)
    seconds = clock.now() - choices[0].received_at if choices else 0.0
    return exchange.json_response(
        WhatIfLoad(
            len(choices),
            seconds,
            _most_running(choices),
            MAX_RECENT_CHOICES,
            MAX_RECENT_TOKENS,
            offered_flags(config),
        )
    )


def _most_running(choices: Sequence[MeasuredChoice]) -> int:
    """Return how many choices ran at the same time at the most."""
    changes = [(choice.admitted_at, 1) for choice in choices]
    changes += [(choice.last_token_at, -1) for choice in choices]  # before others that begin then
    return max(accumulate(change for _, change in sorted(changes)), default=0)


async def what_if(request: web.Request) -> web.Response:
    """Simulate the last minutes with the server's flags, and with those of each variant."""
    access.check_operator(request, "the load is that of")
    call = sampling.convert(await exchange.read_object(request), WhatIfRequest)
    _check(call)
    gateway, model = request.app[exchange.GATEWAY], exchange.model_of(request)
    choices = model.recent.since(clock.now() - call.last_s)
    if not choices:
        raise ApiError(
            409,
            f"no request by HTTP that arrived in the last {call.last_s:g} s has been answered: send"
            " some first, or give a larger last_s",
            param="last_s",
            code="nothing_recorded",
        )
    config, info = await _as_it_was(model)
    job = WhatIfJob(
        choices=choices,
        flags=simulator_flags(config),
        variants=[_variant(config, place, one) for place, one in enumerate(call.variants)],
        context_length=info["context_length"],
        device=info["device"],
    )
    answer = await gateway[SIMULATION].run(job)
    return web.Response(body=answer, content_type="application/json")


async def _as_it_was(model: ServedModel) -> tuple[ServerConfig, dict[str, Any]]:
    try:
        info = await model.server_info.current()
    except QuadrigaError as error:
        raise from_server(error, {}) from None
    if "pages_total" not in info:
        raise ApiError(
            503, "the worker is not ready: try again when /readyz answers 200", "server_error"
        )
    return config_as_it_was(model.config, info), info


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
    endpoint.Endpoint("/v1/what_if", what_if_load, "The load and the flags that can be simulated",
             WhatIfLoad),
    endpoint.post("/v1/what_if", what_if, "The last minutes with other flags, beside what happened",
         WhatIfRequest, WhatIfAnswer),
]  # fmt: skip
