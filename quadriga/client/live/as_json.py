"""Messages of the live feed as JSON values with named fields, as the web gateway sends them."""

from typing import Any

import msgspec

from quadriga.wire.messages.live import LiveServer, LiveStep

_plain = msgspec.structs.asdict


def step_to_json(step: LiveStep) -> dict[str, Any]:
    """Return a step as a JSON object."""
    tree = None if step.tree is None else _plain(step.tree)
    return _plain(step) | {
        "requests": [_plain(request) for request in step.requests],
        "events": [_plain(event) for event in step.events],
        "gauges": _plain(step.gauges),
        "tree": tree,
    }


def server_to_json(server: LiveServer) -> dict[str, Any]:
    """Return the processes as a JSON object."""
    return _plain(server) | {"processes": [_plain(process) for process in server.processes]}


def step_from_json(value: dict[str, Any]) -> LiveStep:
    """Return the step of a JSON object. Raise msgspec.ValidationError where it is none."""
    step: LiveStep = _from_json(
        value, LiveStep, lists=("requests", "events"), structs=("gauges", "tree")
    )
    return step


def server_from_json(value: dict[str, Any]) -> LiveServer:
    """Return the processes of a JSON object. Raise msgspec.ValidationError where it is none."""
    server: LiveServer = _from_json(value, LiveServer, lists=("processes",))
    return server


def _from_json(
    value: dict[str, Any], kind: Any, lists: tuple[str, ...], structs: tuple[str, ...] = ()
) -> Any:
    """Convert an object with named fields; fields that this release does not know are ignored."""
    places: dict[str, Any] = dict(value)
    for name in lists:
        places[name] = [list(item.values()) for item in value.get(name, ())]
    for name in structs:
        inner = value.get(name)
        places[name] = None if inner is None else list(inner.values())
    fields = [places.get(name) for name in kind.__struct_fields__]
    return msgspec.convert([kind.__struct_config__.tag, *fields], kind, strict=False)
