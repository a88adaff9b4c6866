"""Write tool calls as text, in the form in which the model answers."""

import json
from typing import Any

from quadriga.answer_format import CallFormat, CallStyle

Function = dict[str, Any]


def write_calls(calls: list[dict[str, Any]], form: CallFormat) -> str:
    """Return calls in OpenAI's form as text.

    Args:
        calls: the calls; the arguments are a map or JSON text.
        form: the marks and the style. HARMONY is written as JSON between its marks.
    """
    functions = [_function(call) for call in calls]
    if form.style is CallStyle.PYTHONIC:
        return form.open + "[" + ", ".join(map(_pythonic, functions)) + "]" + form.close
    bodies = [_write_one(index, function, form) for index, function in enumerate(functions)]
    if form.is_list:
        return f"{form.open}[{', '.join(bodies)}]{form.close}"
    if form.call_open or form.call_close or form.separator:
        return form.open + form.separator.join(bodies) + form.close
    return "\n".join(form.open + body + form.close for body in bodies)


def _function(call: dict[str, Any]) -> Function:
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    is_map = isinstance(arguments, dict)
    return {
        "name": str(function.get("name", "")),
        "arguments": arguments if is_map else {"arguments": arguments},
    }


def _write_one(index: int, function: Function, form: CallFormat) -> str:
    name, arguments = str(function["name"]), function["arguments"]
    if form.style is CallStyle.JSON:
        value = {name: arguments}
        if form.name_key:
            value = {form.name_key: name, form.arguments_key: arguments}
        return form.call_open + _json(value) + form.call_close
    if form.style is CallStyle.TAGGED:
        body = "".join(_tagged(key, value, form) for key, value in arguments.items())
    elif form.style is CallStyle.QUOTED:
        body = _quoted(arguments, form.quote)
    else:
        body = _json(arguments)
    if form.index_open:
        name += f"{form.index_open}{index}"
    return form.call_open + form.name_open + name + form.name_close + body + form.call_close


def _tagged(key: str, value: Any, form: CallFormat) -> str:
    if isinstance(value, str):
        key_close, text = form.string_key_close or form.key_close, value
    else:
        key_close, text = form.key_close, _json(value)
    return form.key_open + key + key_close + text + form.value_close


def _quoted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        fields = (f"{key}:{_quoted(item, quote)}" for key, item in value.items())
        return "{" + ",".join(fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_quoted(item, quote) for item in value) + "]"
    return _json(value)


def _pythonic(function: Function) -> str:
    fields = (f"{key}={value!r}" for key, value in function["arguments"].items())
    return f"{function['name']}({', '.join(fields)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
