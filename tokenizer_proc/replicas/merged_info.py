"""The server's info, made of the infos of its replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.wire.messages.to_client import InfoValues

# Values that are the same for all, or of which the largest says most; all other numbers are added.
LARGEST = frozenset(
    {"page_size", "chunked_prefill_size", "new_token_ratio", "step_gap_ms_p50", "step_gap_ms_p99"}
)
JOURNAL_FAILED = "failed"


def merged_info(asked: InfoValues, infos: Mapping[int, InfoValues]) -> InfoValues:
    """Return the info of a server.

    Args:
        asked: what the frontend has put into the question, which is in each answer.
        infos: the answers by the numbers of the replicas, at least one.
    """
    own = {
        number: {name: value for name, value in values.items() if name not in asked}
        for number, values in infos.items()
    }
    merged: InfoValues = dict(asked)
    for name in dict.fromkeys(name for values in own.values() for name in values):
        merged[name] = _merged(name, [values[name] for values in own.values() if name in values])
    merged["pids"] = _pids(asked, infos)
    merged["replicas"] = [{"replica": number, **own[number]} for number in sorted(own)]
    return merged


def _merged(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name == "ready":
        return any(values)
    if name == "journal":
        return JOURNAL_FAILED if JOURNAL_FAILED in values else first
    if name in LARGEST:
        return max((value for value in values if value is not None), default=None)
    return _added(values)


def _added(values: Sequence[Any]) -> Any:
    """Return the sum of numbers, of the items of maps and of lists; of anything else the first."""
    first = values[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _added([v[name] for v in values if name in v]) for name in names}
    if isinstance(first, list):
        return [_added(items) for items in zip(*values, strict=True)]
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values)
    return next((value for value in values if value is not None), None)


def _pids(asked: InfoValues, infos: Mapping[int, InfoValues]) -> dict[str, int]:
    """Return the pids of all processes; those of a replica are called as in the log."""
    pids = dict(asked.get("pids") or {})
    for number, values in sorted(infos.items()):
        for name, pid in (values.get("pids") or {}).items():
            if name not in (asked.get("pids") or {}):
                pids[f"{name}/{number}"] = pid
    return pids
