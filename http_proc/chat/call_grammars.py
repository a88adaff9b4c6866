"""Grammars of tool calls: for calls that are forced, and for calls within free text."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from http_proc.chat.argument_forms import Inexpressible
from http_proc.chat.call import ChatCall
from http_proc.chat.call_forms import (
    CallableTool,
    arguments_schema,
    calls_in_text,
    calls_or_json,
    harmony_answer,
    only_calls,
)
from http_proc.protocol.errors import invalid
from quadriga.answer_format import CallFormat, CallStyle
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.tag_formats import (
    Alternatives,
    ConstString,
    Format,
    JsonValue,
    RegexMatch,
)

# The form of a forced call where the model's own cannot be made to obey the tools: one JSON object.
PLAIN_CALL = CallFormat(style=CallStyle.JSON)


class CallGrammar(NamedTuple):
    """A grammar of calls.

    Attributes:
        fields: fields of SamplingParams.
        calls: the form in which the calls are written.
    """

    fields: dict[str, Any]
    calls: CallFormat


def forced_calls(call: ChatCall, calls: CallFormat | None, is_trained: bool = True) -> CallGrammar:
    """Return the grammar of calls, and no text, that obey their tools.

    What no grammar can enforce of a tool that is not strict is left out.

    Args:
        call: the chat. A tool that it names is called once.
        calls: the model's own form; None: it has none.
        is_trained: the model has learned to call tools. Otherwise it calls one, as it may not know
            when to stop.
    """
    name = call.tool_choice.name
    tools = [
        CallableTool(tool.function.name, arguments_schema(tool.function, _title(call, index)))
        for index, tool in enumerate(call.tools)
        if not name or tool.function.name == name
    ]
    is_parallel = call.is_parallel and is_trained and not name
    marks = calls or PLAIN_CALL
    try:
        form = only_calls(marks, tools, is_parallel)
    except Inexpressible:
        marks = PLAIN_CALL
        form = only_calls(marks, tools, is_parallel=False)
    return CallGrammar(_fields(form), marks)


def strict_calls(call: ChatCall, calls: CallFormat) -> CallGrammar:
    """Return the grammar of text with calls that obey their tools.

    Calls of tools that are not strict may have any arguments.

    Raises:
        ApiError: the model's form cannot be made to obey a strict tool.
    """
    with _inexpressible(call, calls):
        form = calls_in_text(calls, _callable_tools(call), call.is_parallel)
        return CallGrammar(_fields(form), calls)


def strict_calls_or_json(call: ChatCall, calls: CallFormat, schema: dict[str, Any]) -> CallGrammar:
    """Return the grammar of an answer of calls, as in `strict_calls`, or of JSON of a schema.

    Raises:
        ApiError: the model's form cannot be made to obey a strict tool.
    """
    with _inexpressible(call, calls):
        form = calls_or_json(calls, _callable_tools(call), call.is_parallel, schema)
        return CallGrammar(_fields(form), calls)


def _callable_tools(call: ChatCall) -> list[CallableTool]:
    """Return the tools; calls of those that are not strict may have any arguments."""
    return [
        CallableTool(
            tool.function.name,
            arguments_schema(tool.function, _title(call, index)) if tool.function.strict else None,
        )
        for index, tool in enumerate(call.tools)
    ]


def _title(call: ChatCall, index: int) -> str:
    """Return what errors call the parameters of a tool."""
    return f"{call.name('tools')}[{index}] ({call.tools[index].function.name})"


@contextmanager
def _inexpressible(call: ChatCall, calls: CallFormat) -> Iterator[None]:
    """Convert the error of a strict tool that the form of calls cannot be made to obey."""
    try:
        yield
    except Inexpressible:
        field = call.name("tools")
        raise invalid(
            f"{_inexpressible_tool(call, calls)}, which this model's form of calls cannot be made"
            " to obey; leave strict out, or require the call",
            field,
        ) from None


def _inexpressible_tool(call: ChatCall, calls: CallFormat) -> str:
    """Return the first strict tool that the form cannot be made to obey, and the keyword."""
    for index, tool in enumerate(_callable_tools(call)):
        try:
            calls_in_text(calls, [tool], call.is_parallel)
        except Inexpressible as error:
            keyword = f"the keyword {error.args[0]}" if error.args else "parameters"
            return f"{_title(call, index)} has {keyword}"
    return f"{call.name('tools')} have parameters"


def in_final_message(params: SamplingParams) -> SamplingParams:
    """Return the parameters for a model that writes messages to channels, as gpt-oss does.

    A grammar holds for the message to the user. One in EBNF is left as it is.
    """
    content: Format
    if params.json_schema is not None:
        schema = json_schema_of(params)
        if schema is None:
            return params  # the ring refuses it
        content = JsonValue(json_schema=schema)
    elif params.regex is not None:
        content = RegexMatch(pattern=params.regex)
    elif params.choice is not None:
        content = Alternatives(elements=[ConstString(value=text) for text in params.choice])
    else:
        return params
    fields = {"json_schema": None, "regex": None, "choice": None}
    return msgspec.structs.replace(params, **{**fields, **_fields(harmony_answer(content))})


def json_schema_of(params: SamplingParams) -> dict[str, Any] | None:
    """Return the JSON schema that the text must obey; None if there is none that can be read."""
    schema: Any = params.json_schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return None
    return schema if isinstance(schema, dict) else None


def _fields(form: Format) -> dict[str, Any]:
    return {"structural_tag": {"format": msgspec.to_builtins(form)}}
