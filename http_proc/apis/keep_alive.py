"""Ollama's keep_alive: how long a model stays loaded after a request, and until when it does."""

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from http_proc.apis.model_states import MODEL_STATES, ModelStates
from http_proc.core.caller import current_caller
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from quadriga.clock import now

KeepAlive = str | float

# Seconds of a unit in a duration, as Go writes it.
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
_PARTS = re.compile(_PART, re.ASCII)
_DURATION = re.compile(rf"[+-]?(?:{_PART})+", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
MAX_CHARS = 40
# A longer time is for ever, as a negative one is: its end could not be written as a date.
MAX_KEEP_S = 10 * 365 * 86400.0
NEVER_S = -1.0


def keep_seconds(keep_alive: KeepAlive) -> float:
    """Return the seconds of a keep_alive; NEVER_S: the model stays loaded.

    Args:
        keep_alive: seconds, or a duration such as "5m", "1h30m" or "300ms"; below 0: for ever.

    Raises:
        ApiError: it is neither.
    """
    seconds = _seconds(keep_alive)
    return seconds if 0 <= seconds <= MAX_KEEP_S else NEVER_S


def _seconds(keep_alive: KeepAlive) -> float:
    if not isinstance(keep_alive, str):
        return keep_alive
    text = keep_alive.strip()
    if len(text) <= MAX_CHARS:
        if _NUMBER.fullmatch(text):
            return float(text)
        if _DURATION.fullmatch(text):
            total = sum(float(number) * _UNITS[unit] for number, unit in _PARTS.findall(text))
            return -total if text.startswith("-") else total
    raise invalid(
        f'keep_alive is {keep_alive[:MAX_CHARS]!r}: write seconds, or a duration such as "5m" or'
        ' "24h"; 0 unloads the model after the request, -1 keeps it loaded',
        "keep_alive",
    )


@contextmanager
def kept_alive(
    gateway: Gateway, model: ServedModel, keep_alive: KeepAlive | None
) -> Iterator[None]:
    """Let a model stay loaded as a request asks for it, which a `with` block answers.

    What a tenant's key asks for has no effect: the models are those of all tenants.

    Raises:
        ApiError: the value is wrong.
    """
    states, seconds = _states(gateway), None if keep_alive is None else keep_seconds(keep_alive)
    if states is None or seconds is None:
        yield
        return
    if seconds:
        states.keep(model, seconds)
    try:
        yield
    finally:
        if not seconds:  # before, it would be unloaded before the request
            states.keep(model, 0.0)


async def load_or_unload(gateway: Gateway, model: ServedModel, keep_alive: KeepAlive | None) -> str:
    """Load a model for a request without input, or unload it where keep_alive is 0.

    Returns:
        "load" once the model is loaded, or "unload".

    Raises:
        ApiError: the value is wrong, or the model cannot be loaded.
    """
    with kept_alive(gateway, model, keep_alive):
        if keep_alive is not None and keep_seconds(keep_alive) == 0:
            return "unload"
        if (states := _states(gateway)) is not None:
            await states.until_loaded(model)
        return "load"


def _states(gateway: Gateway) -> ModelStates | None:
    """Return what loads and unloads models; None: the caller may not ask for it."""
    return gateway.get(MODEL_STATES) if current_caller().entry is None else None


def expires_at(model: ServedModel, is_busy: bool) -> float:
    """Return the Unix time at which a loaded model is unloaded if no request comes.

    Args:
        model: the model.
        is_busy: it has requests, so that its time has not begun.

    Returns:
        Infinite: it is not unloaded.
    """
    load = model.load
    if load.idle_s is None:
        return math.inf
    idle_for_s = 0.0 if is_busy else time.monotonic() - load.used_at
    return now() + load.idle_s - idle_for_s
