"""ResponsePlan: what a request asks for, checked and ready for the server."""

from dataclasses import dataclass
from typing import Any

import msgspec

from http_proc.apis.responses.answer import ResponseAnswer, new_response
from http_proc.apis.responses.input import (
    RequestTools,
    chat_turns,
    list_items,
    parse_items,
    request_tools,
    tools_of,
)
from http_proc.apis.responses.output import ResponseOutput
from http_proc.apis.responses.schema import (
    LOGPROBS,
    RESPONSES,
    ResponsesRequest,
    conversation_id,
)
from http_proc.apis.responses.store import Items, ResponseStore
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.observe import CallRecord
from http_proc.core.request_group import RequestGroup
from http_proc.core.served_model import ResponseHead, ServedModel
from http_proc.generation.cache_hints import PromptMark, openai_hint
from http_proc.generation.chat_call import ChatCall, ReasoningOptions, ToolMode
from http_proc.generation.prepare import PreparedChat, prepare_chat
from http_proc.generation.sampling import (
    ANY_OBJECT,
    Sampling,
    convert,
    lenient,
    take_sampling,
    with_grammar,
)
from http_proc.generation.schema import check_metadata
from quadriga.client.types import Chat
from quadriga.sampling.params import SamplingParams

# The request's name of each field of the server.
NAMES = {"prompt": "input", "messages": "input"}


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A request that was checked.

    Attributes:
        model: answers it.
        history: the items that come before those of its input.
        given: the items of its input; references are replaced by what they refer to.
    """

    model: ServedModel
    fields: ResponsesRequest
    params: SamplingParams
    history: Items
    given: Items
    tools: RequestTools
    call: ChatCall
    prepared: PreparedChat

    @property
    def refers_to_store(self) -> bool:
        """Whether the input has items that the store has replaced."""
        return isinstance(self.fields.input, list) and self.fields.input != self.given

    def answer(self, head: ResponseHead) -> ResponseAnswer:
        """Return the response before its answer."""
        response = new_response(head, self.fields, self.params, self.tools)
        return ResponseAnswer(response, ResponseOutput(head.id, self.tools.named))

    def submit(self, group: RequestGroup) -> None:
        """Send the chat to the server.

        Chunks say which tokens are reasoning, to which text logprobs belong and where a call is
        repeated, so that a whole answer is read in chunks, too, if it may have one of them.
        """
        call, options, fields = self.call, self.prepared.options, self.fields
        if fields.truncation is not None:
            options = {**options, "truncate_prompt": fields.truncation == "auto"}
        params = self.prepared.params
        has_logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        reads_events = call.stream or fields.background
        in_chunks = reads_events or has_logprobs or self.prepared.reader.needs_chunks
        group.submit(call.messages, params, in_chunks, options)


async def make_plan(
    gateway: Gateway,
    store: ResponseStore,
    body: dict[str, Any],
    record: CallRecord,
    history: Items | None = None,
    model: ServedModel | None = None,
) -> ResponsePlan:
    """Return the plan of a request.

    Args:
        gateway: its state.
        store: has what the request refers to.
        body: of the request.
        record: of the call.
        history: the items that come before the input; None: those that the request refers to.
        model: answers the request; None: the model that it names.

    Raises:
        ApiError: the request is wrong, or refers to what the store does not have.
    """
    body = dict(body)
    sampling = take_sampling(body, RESPONSES, {})
    fields = convert(body, ResponsesRequest, RESPONSES)
    model = model or gateway.served(fields.model, record)
    _check_supported(fields, sampling.params)
    if history is None:
        check_metadata(fields.metadata)  # what an earlier gateway has accepted goes on
        history = await _stored_items(fields, store)
    given = await list_items(fields.input, store)
    parsed = parse_items(history + given, len(history))
    found = tools_of(parsed, len(history))
    tools = request_tools(fields.tools, fields.tool_choice, found)
    turns = chat_turns(fields.instructions, parsed, len(history))
    marked = _last_breakpoint(history + given)
    mark = None
    if marked is not None:  # of the turns up to that item
        items = parsed[: marked + 1]
        before = chat_turns(fields.instructions, items, min(len(history), len(items)))
        mark = PromptMark(len(before))
    call = _chat_call(fields, turns, tools, _sampling(sampling, fields, tools), mark)
    prepared = await prepare_chat(gateway, model, call)
    return ResponsePlan(model, fields, sampling.params, history, given, tools, call, prepared)


def _last_breakpoint(items: Items) -> int | None:
    """Return the place of the last item that has a prompt_cache_breakpoint."""
    places = range(len(items) - 1, -1, -1)
    return next((place for place in places if _has_breakpoint(items[place])), None)


def _has_breakpoint(item: dict[str, Any]) -> bool:
    parts = item.get("content")
    return isinstance(parts, list) and any(
        isinstance(part, dict) and part.get("prompt_cache_breakpoint") for part in parts
    )


def _check_supported(fields: ResponsesRequest, params: SamplingParams) -> None:
    if params.max_new_tokens == 0:
        raise invalid("max_output_tokens is 0: it must be at least 1", "max_output_tokens")
    if fields.background and not fields.store:
        raise invalid("background is true and store is false: it must be true", "store")
    if fields.conversation is not None and fields.previous_response_id is not None:
        raise invalid(
            "conversation and previous_response_id are given: a response continues one of them",
            "conversation",
        )
    if fields.prompt is not None:
        raise invalid(
            "prompt refers to a stored template, and this server stores none: send its text in"
            " instructions or input",
            "prompt",
        )


async def _stored_items(fields: ResponsesRequest, store: ResponseStore) -> Items:
    """Return the items that come before the request's input. Raise ApiError."""
    if fields.previous_response_id is not None:
        return await store.items_of_response(fields.previous_response_id)
    if fields.conversation is not None:
        return await store.items_of_conversation(conversation_id(fields.conversation))
    return []


def _sampling(sampling: Sampling, fields: ResponsesRequest, tools: RequestTools) -> Sampling:
    """Add the logprobs, and the grammar of the text; an answer that must be a call has no text."""
    if LOGPROBS in fields.include or fields.top_logprobs:
        params = msgspec.structs.replace(sampling.params, logprobs=fields.top_logprobs)
        sampling = Sampling(params, {**sampling.names, "logprobs": "top_logprobs"})
    wanted = fields.text.format
    if wanted is None or wanted.type == "text" or tools.choice.mode is ToolMode.REQUIRED:
        return sampling
    schema = ANY_OBJECT if wanted.type == "json_object" else wanted.schema
    if schema is None:
        raise invalid("text.format.schema is missing: it must be a JSON schema", "text.format")
    schema = schema if wanted.strict else lenient(schema)
    return with_grammar(sampling, "text", {"json_schema": schema})


def _chat_call(
    fields: ResponsesRequest,
    turns: Chat,
    tools: RequestTools,
    sampling: Sampling,
    mark: PromptMark | None,
) -> ChatCall:
    return ChatCall(
        messages=turns,
        sampling=sampling,
        tools=tools.callable,
        tool_choice=tools.choice,
        is_parallel=fields.parallel_tool_calls,
        reasoning=ReasoningOptions(effort=fields.reasoning.effort),
        template_args=fields.chat_template_kwargs,
        priority=fields.priority,
        cache=openai_hint(
            fields.prompt_cache_key,
            fields.prompt_cache_retention,
            fields.prompt_cache_options,
            mark,
        ),
        stream=fields.stream,
        names=NAMES,
    )
