"""Turn a chat request into a request to the server, and a reader of its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from http_proc.answer.marks import AnswerParser
from http_proc.answer.parser import ToolSchemas, make_parser
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from http_proc.generation.call_grammars import (
    forced_calls,
    in_final_message,
    json_schema_of,
    strict_calls,
    strict_calls_or_json,
)
from http_proc.generation.chat_call import NAMES, ChatCall, ToolMode, template_options
from http_proc.generation.sampling import BUDGET, Sampling, with_grammar, with_thinking
from quadriga.client.async_client import RequestOptions
from quadriga.sampling.params import GRAMMAR_FIELDS, SamplingParams
from quadriga.server.answer_format import (
    AnswerFormat,
    CallFormat,
    CallStyle,
    ReasoningFormat,
    ends_inside,
    from_info,
)
from quadriga.wire.client import ChatOptions


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Makes the parsers of a request's answers.

    Attributes:
        answer_format: how the model writes.
        tools: the tools that may be called; empty: answers have no calls.
        max_calls: number of calls that an answer may have; None: any.
        parses_reasoning: the reasoning is separated from the text.
        ends_at_repeat: a call that repeats an earlier one ends the answer.
        takes_unmarked: calls may lack their marks: no grammar makes the answer, and the server's
            flags allow it.
        text_end: the end of the prompt's text, where the server is sent token ids; None: the server
            reports it.
    """

    answer_format: AnswerFormat
    tools: ToolSchemas
    max_calls: int | None
    parses_reasoning: bool
    ends_at_repeat: bool
    takes_unmarked: bool
    text_end: str | None = None

    @property
    def needs_chunks(self) -> bool:
        """Whether an answer is read while it is written, even if it is sent as a whole.

        The tokens of the reasoning are counted by chunks, and a repeat ends the answer.
        """
        return self.separates_reasoning or self.ends_at_repeat

    @property
    def separates_reasoning(self) -> bool:
        """Whether the answers may have reasoning beside their text."""
        return self.parses_reasoning and self.answer_format.reasoning is not None

    def parser(self, prompt_end: str) -> AnswerParser:
        """Return a parser for one answer to the prompt whose end the server reports."""
        end = prompt_end if self.text_end is None else self.text_end
        return make_parser(
            self.answer_format,
            tools=self.tools,
            begins_in_reasoning=_ends_in_reasoning(end, self.answer_format.reasoning),
            parses_reasoning=self.parses_reasoning,
            max_calls=self.max_calls,
            ends_at_repeat=self.ends_at_repeat,
            takes_unmarked=self.takes_unmarked,
        )


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that is ready for the server.

    Attributes:
        names: the request's name of each field of the server, for error messages.
    """

    params: SamplingParams
    options: RequestOptions
    names: Mapping[str, str]
    reader: AnswerReader


async def prepare_chat(gateway: Gateway, model: ServedModel, call: ChatCall) -> PreparedChat:
    """Return the parameters, options and reader of a chat.

    Args:
        gateway: its state.
        model: answers the chat.
        call: the chat.

    Raises:
        ApiError: the model has no chat template, a tool or a choice is wrong, or two grammars are
            asked for.
    """
    info = await model.server_info.static()
    if not info["chat"]:
        kind, remedy = "it is a base model", "send a plain prompt to /v1/completions"
        if info.get("encoder"):
            kind, remedy = "it is an encoder", "send texts to /v1/embeddings"
            if info.get("scores"):
                kind, remedy = "it scores texts", "send them to /rerank, /score or /classify"
        able = await gateway.models.names_of(lambda info: bool(info["chat"]))
        others = f", or the chat to {' or '.join(map(repr, able))}" if able else ""
        raise invalid(
            f"{model.name} has no chat template, {kind}: {remedy}{others}",
            call.name("messages"),
            "no_chat_template",
        )
    call.check_tools()
    answer_format = from_info(info["answer_format"])
    sampling, answer_format = _with_calls(call, answer_format)
    reader = AnswerReader(
        answer_format,
        ToolSchemas(
            {tool.function.name: tool.function.parameters or {} for tool in call.visible_tools}
        ),
        None if call.is_parallel else 1,
        call.reasoning.is_parsed,
        ends_at_repeat=call.is_parallel and call.tool_choice.mode is ToolMode.REQUIRED,
        takes_unmarked=answer_format.takes_unmarked
        and all(getattr(sampling.params, name) is None for name in GRAMMAR_FIELDS),
    )
    chat = _chat_options(call, answer_format)
    options: RequestOptions = {
        "priority": call.priority,
        "chat": chat,
        "cache_salt": call.cache_salt,
        "cache": call.cache,
    }
    names = {**NAMES, **call.names, **sampling.names}
    params = _params(sampling.params, call, answer_format)
    if reader.ends_at_repeat:
        params = msgspec.structs.replace(params, text_lengths=True)
    return PreparedChat(params, options, names, reader)


def _ends_in_reasoning(prompt_end: str, reasoning: ReasoningFormat | None) -> bool:
    """Return whether the last of the marks in the end of a prompt opens the reasoning."""
    if reasoning is None or not reasoning.open:
        return False
    return ends_inside(prompt_end, reasoning.open, reasoning.close)


def _with_calls(call: ChatCall, answer_format: AnswerFormat) -> tuple[Sampling, AnswerFormat]:
    """Add the grammar of forced calls and of strict tools; return the format of the answer."""
    sampling, calls, name = call.sampling, answer_format.calls, call.name("tools")
    if call.tool_choice.mode is ToolMode.REQUIRED:
        grammar, calls = forced_calls(call, calls, answer_format.takes_tools)
        answer_format = msgspec.structs.replace(answer_format, calls=calls)
        return with_grammar(sampling, name, grammar), answer_format
    may_call = call.tool_choice.mode is ToolMode.AUTO and bool(call.tools)
    schema = json_schema_of(sampling.params)
    if may_call and calls is not None and schema is not None:
        return _with_calls_or_json(call, calls, schema), answer_format
    if may_call and calls is not None and any(tool.function.strict for tool in call.tools):
        return with_grammar(sampling, name, strict_calls(call, calls)), answer_format
    if calls is not None and calls.style is CallStyle.HARMONY:
        return Sampling(in_final_message(sampling.params), sampling.names), answer_format
    return sampling, answer_format


def _with_calls_or_json(call: ChatCall, calls: CallFormat, schema: dict[str, Any]) -> Sampling:
    """Replace a JSON schema, which would allow no call, by a grammar of calls or of its JSON."""
    params, names = call.sampling
    free = Sampling(msgspec.structs.replace(params, json_schema=None), names)
    grammar = strict_calls_or_json(call, calls, schema)
    return with_grammar(free, names.get("json_schema", "json_schema"), grammar)


def _chat_options(call: ChatCall, answer_format: AnswerFormat) -> ChatOptions:
    options = template_options(call.visible_tools, _template_args(call, answer_format))
    if call.continues_message or not call.has_generation_prompt:
        return msgspec.structs.replace(
            options, continue_final_message=call.continues_message, add_generation_prompt=False
        )
    return options


def _template_args(call: ChatCall, answer_format: AnswerFormat) -> dict[str, Any]:
    arguments, reasoning = dict(call.template_args), answer_format.reasoning
    if (is_enabled := _is_enabled(call)) is not None and reasoning is not None and reasoning.switch:
        arguments.setdefault(reasoning.switch, is_enabled)
    if call.reasoning.effort not in (None, "none"):
        arguments.setdefault("reasoning_effort", call.reasoning.effort)
    return arguments


def _is_enabled(call: ChatCall) -> bool | None:
    """Return whether the model shall reason; an effort, other than none, asks for it."""
    if call.reasoning.is_enabled is not None or call.reasoning.effort is None:
        return call.reasoning.is_enabled
    return call.reasoning.effort != "none"


def _budget(call: ChatCall, answer_format: AnswerFormat) -> int | None:
    """Return the budget of the reasoning; 0 turns it off for a template without a switch.

    A model that marks no reasoning has none: there the budget of the call says nothing.
    """
    reasoning = answer_format.reasoning
    if reasoning is None or not reasoning.open:
        return None
    return 0 if not reasoning.switch and _is_enabled(call) is False else call.reasoning.budget


def _is_switched_off(call: ChatCall, answer_format: AnswerFormat) -> bool:
    """Return whether the template turns the reasoning off: then a grammar begins at once."""
    reasoning = answer_format.reasoning
    has_budget = call.sampling.params.thinking_token_budget is not None
    if reasoning is None or not reasoning.switch or has_budget:
        return False
    return not _template_args(call, answer_format).get(reasoning.switch, reasoning.is_default)


def _params(params: SamplingParams, call: ChatCall, answer_format: AnswerFormat) -> SamplingParams:
    """Return the parameters; special tokens are kept in the text if they may be marks."""
    budget = _budget(call, answer_format)
    if budget is not None or not _is_switched_off(call, answer_format):
        params = with_thinking(params, answer_format, budget, call.name(BUDGET))
    has_marks = call.visible_tools or (answer_format.reasoning and call.reasoning.is_parsed)
    if has_marks and answer_format.has_special_marks:
        return msgspec.structs.replace(params, skip_special_tokens=False)
    return params
