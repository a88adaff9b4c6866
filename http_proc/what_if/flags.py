"""The flags that a simulation may change, and those of the server as it was."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from quadriga.config.flags import flag_name, value_type
from quadriga.config.server_config import ServerConfig, help_text
from quadriga.errors import ConfigError

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
}
# These have no effect with other policies than that of the server.
OF_A_POLICY = ("pack_lookahead", "pack_fifo_every", "priority_preemption_threshold")
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
        kind, choices = value_type(field.type).__name__, list(field.metadata["choices"])
        found.append(WhatIfFlag(name, help_text(field), kind, getattr(group, name), choices))
    return found


def with_flags(config: ServerConfig, flags: Mapping[str, Any]) -> ServerConfig:
    """Return a config with other flags, or raise ConfigError for one that cannot be simulated."""
    changes = {_name(given): value for given, value in flags.items()}
    for name, value in changes.items():
        _check(config, name, value)
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


def _check(config: ServerConfig, name: str, value: Any) -> None:
    """Raise ConfigError for a value of a wrong type, or out of the range of a simulation."""
    _, field = _field(config, name)
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None
    choices, largest = field.metadata["choices"], OFFERED[name]
    if choices and value not in choices:
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")
    if largest is not None and value is not None and value > largest:
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
    return words
