"""The form in which items are stored: with an id, a status, and contents in parts."""

from typing import Any

from http_proc.apis.responses.output_items import item_id
from http_proc.apis.responses.store import Items

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_CALLS = ("function_call", "custom_tool_call")


def stored_items(items: Items, owner_id: str) -> Items:
    """Return checked items of an input in the form in which they are stored.

    Args:
        items: as the client sent them.
        owner_id: id of the response, of which new ids are made.
    """
    return [_stored(item, owner_id, number) for number, item in enumerate(items)]


def first_item_ids(response_id: str) -> list[str]:
    """Return the ids that the first item of a response's input or output may have been given."""
    return [
        item_id(prefix, response_id, place)
        for prefix in _PREFIXES.values()
        for place in ("0", "input/0")
    ]


def continued_items(output: Items) -> Items:
    """Return the output items that the next answer continues: calls that were cut are left out."""
    return [item for item in output if not _is_cut_call(item)]


def _is_cut_call(item: dict[str, Any]) -> bool:
    return item.get("type") in _CALLS and item.get("status") == "incomplete"


def _stored(item: dict[str, Any], owner_id: str, number: int) -> dict[str, Any]:
    kind = item["type"]
    known_id = item.get("id")
    new_id = known_id or item_id(_PREFIXES[kind], owner_id, f"input/{number}")
    stored = {**item, "id": new_id, "status": item.get("status") or "completed"}
    if kind == "message":
        stored["content"] = _parts(item["role"], item["content"])
    if kind == "reasoning":
        stored.setdefault("summary", [])
    return stored


def _parts(role: str, content: str | Items) -> Items:
    """Return a content as a list of parts."""
    if isinstance(content, list):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]
