"""OpenAI's POST /v1/completions, POST /v1/chat/completions and POST /render.

For each: the fields of a request, the form of the answer and its stream, the handler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    ParsedAnswer,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.adapters import served_by
from http_proc.core.call import Call
from http_proc.core.errors import from_server, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.observe import timings_body
from http_proc.core.served_model import ResponseHead, ServedModel
from http_proc.core.streaming import (
    DONE,
    EventSink,
    OpenAIEnd,
    Renderer,
    Template,
    collect,
    event,
    stream_events,
)
from http_proc.generation.cache_hints import PromptMark, last_breakpoint, openai_hint
from http_proc.generation.chat_answers import (
    ChatAnswer,
    ChatRenderer,
    collect_chat,
    finish_reason,
    stream_chat,
)
from http_proc.generation.chat_call import (
    ChatCall,
    ReasoningOptions,
    ToolChoice,
    ToolMode,
    chat_prompt,
    check_counts,
)
from http_proc.generation.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from http_proc.generation.prepare import prepare_chat
from http_proc.generation.sampling import (
    CHAT,
    OPENAI,
    Sampling,
    check_choices,
    check_prompt_logprobs,
    check_receipt,
    convert,
    fill_format,
    fill_params,
    take_sampling,
    with_response_format,
    with_thinking,
)
from http_proc.generation.schema import (
    AnswerMessage,
    ChatBody,
    ChatChoice,
    ChatRequest,
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    FunctionCall,
    Message,
    StreamUsage,
    Tool,
    ToolCall,
    check_metadata,
    last_ids,
    usage_body,
)
from http_proc.web.endpoint import answering, generating
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion, Prompt, StreamChunk
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import SamplingParams
from quadriga.server.answer_format import from_info
from quadriga.server.model_info import FillFormat
from quadriga.wire.cache import CacheHint
from quadriga.wire.client import Accepted

# OpenAI documents it, vLLM has it, and clients of this endpoint rely on it.
DEFAULT_MAX_TOKENS = 16
TEXT = "@text@"  # placeholder of the text in a chunk
# The request's name of each field of the server, beside the sampling fields.
NAMES = {"prompt_token_ids": "prompt", "token_ids": "prompt"}

_encode = msgspec.json.encode


async def completions(gateway: Gateway, call: Call, sink: EventSink) -> CompletionBody | None:
    """Complete each prompt n times."""
    body = await call.parse()
    sampling = take_sampling(body, OPENAI, {"max_new_tokens": DEFAULT_MAX_TOKENS})
    fields = convert(body, CompletionRequest, OPENAI)
    model = served_by(gateway, fields.model, fields.lora, fields.lora_path, call.record)
    sampling = with_response_format(sampling, fields)
    _check_completion(fields, sampling.params)
    check_receipt(fields)
    check_metadata(fields.metadata)
    prompts = list_prompts(fields.prompt)
    params, n = _with_logprobs(sampling.params, fields), sampling.params.n
    if params.thinking_token_budget is not None:
        answer_format = from_info((await model.server_info.static())["answer_format"])
        params = with_thinking(params, answer_format, None)
    check_choices(n, len(prompts))
    if fields.suffix:
        known = fill_format(await model.server_info.static(), model.name, "suffix")
        prompts = _with_suffix(prompts, fields.suffix, known)
        params = fill_params(params, known)
    head = model.head(call, "cmpl")
    options: RequestOptions = {
        "priority": fields.priority,
        "cache_salt": fields.cache_salt or "",
        "cache": _cache_hint(fields),
    }
    names = {**NAMES, **sampling.names}
    with gateway.open_group(model, head.id, names, call.record) as group:
        for prompt in prompts:
            group.submit(prompt, params, fields.stream, options)
        echoes = await _echoes(model, prompts, params.skip_special_tokens, fields.echo)
        prompt_ids = await _ids_of(model, prompts) if fields.return_token_ids else None
        if fields.stream:
            usage = StreamUsage(fields.stream_options, n)
            renderer = CompletionStream(head, n, echoes, usage, prompt_ids)
            await stream_events(sink, group, renderer)
            return None
        completions = await collect(group)
        answer = _completion_body(head, n, echoes, completions, fields)
        if prompt_ids is not None:
            _add_ids(answer, n, prompt_ids, completions)
        if fields.receipt:
            answer.receipts = await group.receipts(completions)
    return answer


def list_prompts(prompt: str | list[str | int | list[int]], field: str = "prompt") -> list[Prompt]:
    """Return the prompts of a field: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid(f"{field} is an empty list: send at least one", field)
    types = set(map(type, prompt))
    if types == {int}:
        return [cast(list[int], prompt)]
    if int in types:
        raise invalid(f"{field} mixes token ids with texts: send lists of ids", field)
    return cast(list[Prompt], prompt)


def _with_logprobs(params: SamplingParams, call: CompletionRequest) -> SamplingParams:
    """Return the parameters with logprobs; echo adds those of the prompt."""
    echoed = call.logprobs if call.echo else None
    num_top = [num for num in (echoed, call.prompt_logprobs) if num is not None]
    return msgspec.structs.replace(
        params, logprobs=call.logprobs, prompt_logprobs=max(num_top, default=None)
    )


def _check_completion(call: CompletionRequest, params: SamplingParams) -> None:
    if params.max_new_tokens == 0 and not call.echo:
        raise invalid(
            "max_tokens is 0: it must be at least 1, or come with echo, for the prompt alone",
            "max_tokens",
        )
    check_prompt_logprobs(call)
    if call.best_of not in (None, 1, params.n):
        raise invalid(f"best_of is {call.best_of}: only 1 or n is supported", "best_of")
    if call.suffix and call.echo:
        raise invalid(
            "suffix and echo are both given: the completion stands before the suffix; leave one"
            " out",
            "suffix",
        )


def _with_suffix(prompts: list[Prompt], suffix: str, known: FillFormat) -> list[Prompt]:
    """Return the prompts that ask for the text between each prompt and the suffix."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise invalid("suffix needs prompts that are texts: prompt has token ids", "suffix")
    return [known.prompt(text, suffix) for text in texts]


async def _echoes(
    model: ServedModel, prompts: list[Prompt], skip_special_tokens: bool, echo: bool
) -> list[str]:
    """Return the text before the completion of each prompt."""
    if not echo:
        return [""] * len(prompts)
    return [
        prompt
        if isinstance(prompt, str)
        else await model.client.detokenize(cast(list[int], prompt), skip_special_tokens)
        for prompt in prompts
    ]


async def _ids_of(model: ServedModel, prompts: list[Prompt]) -> list[list[int]]:
    """Return the token ids of prompts."""
    return [
        (await model.client.render(prompt)).token_ids
        if isinstance(prompt, str)
        else cast(list[int], prompt)
        for prompt in prompts
    ]


def _add_ids(
    answer: CompletionBody, n: int, prompt_ids: list[list[int]], completions: list[Completion]
) -> None:
    for index, (choice, completion) in enumerate(zip(answer.choices, completions, strict=True)):
        choice.prompt_token_ids = last_ids(prompt_ids[index // n], completion.usage.prompt_tokens)
        choice.token_ids = completion.token_ids


def _completion_body(
    head: ResponseHead,
    n: int,
    echoes: list[str],
    completions: list[Completion],
    call: CompletionRequest,
) -> CompletionBody:
    choices = []
    for index, completion in enumerate(completions):
        # The server sends the prompt's logprobs with the first of its n choices.
        of_prompt = completions[index - index % n].prompt_logprobs
        text = echoes[index // n] + completion.text
        choice = CompletionChoice(index, text, completion.finish_reason)
        choice.stop_reason = completion.matched_stop
        if completion.logprobs is not None:
            echoed = (of_prompt or []) if call.echo else []
            choice.logprobs = CompletionLogprobs(0).render([*echoed, *completion.logprobs], text)
        if call.prompt_logprobs is not None and of_prompt is not None:
            choice.prompt_logprobs = prompt_logprobs(of_prompt)
        choices.append(choice)
    usage = usage_body([completion.usage for completion in completions], n)
    timings = timings_body(completions)
    return CompletionBody(head.id, head.created, head.model, choices, usage, timings)


class CompletionStream(OpenAIEnd, Renderer):
    """Renderer of completions.

    A chunk without text is sent only if it is the first or the last of its choice.
    """

    def __init__(
        self,
        head: ResponseHead,
        n: int,
        echoes: list[str],
        usage: StreamUsage,
        prompt_ids: list[list[int]] | None = None,
    ) -> None:
        self._head, self._n = head, n
        self._prompt_ids = prompt_ids
        self._usage = usage
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._templates: dict[int, Template] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def start(self, accepted: Sequence[Accepted]) -> bytes:
        """Note the lengths of the prompts."""
        lengths = [of_prompt.num_prompt_tokens for of_prompt in accepted]
        self._usage.start(lengths)
        if self._prompt_ids is not None:
            self._prompt_ids = list(map(last_ids, self._prompt_ids, lengths))
        return b""

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        """Return the event of a chunk, if any."""
        usage = self._usage.of_chunk(choice, chunk)
        template, text = self._templates.get(choice), chunk.text
        is_first = template is None
        if template is None:
            template = self._templates[choice] = Template(
                self._chunk(choice, TEXT) | self._usage.slot, TEXT, *self._usage.slot.values()
            )
            text = self._echoes[choice] + text
        elif usage == b"null" and not (self._has_ids or text or chunk.completion or chunk.logprobs):
            return b""
        if self._has_ids:
            full = self._full(choice, text, chunk, usage)
            full["choices"][0] |= self._ids(choice, chunk, is_first)
            return event(_encode(full))
        if chunk.completion is not None or chunk.logprobs is not None:
            return event(_encode(self._full(choice, text, chunk, usage)))
        return template.fill(_encode(text), usage)

    @property
    def _has_ids(self) -> bool:
        return self._prompt_ids is not None

    def _ids(self, choice: int, chunk: StreamChunk, is_first: bool) -> dict[str, list[int]]:
        ids = {"token_ids": chunk.token_ids}
        if is_first and self._prompt_ids is not None:
            ids["prompt_token_ids"] = self._prompt_ids[choice // self._n]
        return ids

    def finish(self) -> bytes:
        """Return the event with the usage of all choices, if it is asked for, and the end."""
        total = self._usage.total()
        return (event(_encode(self._chunk(None) | total)) if total else b"") + DONE

    def _full(self, choice: int, text: str, chunk: StreamChunk, usage: bytes) -> dict[str, Any]:
        """Return a chunk with more than text: logprobs, or the end of the choice."""
        end = chunk.completion
        full = self._chunk(choice, text, *((end.finish_reason, end.matched_stop) if end else ()))
        if chunk.logprobs is not None:
            tokens = [*(chunk.prompt_logprobs or ()), *chunk.logprobs]
            if choice not in self._logprobs:
                offset = 0 if chunk.prompt_logprobs else len(self._echoes[choice])
                self._logprobs[choice] = CompletionLogprobs(offset)
            full["choices"][0]["logprobs"] = self._logprobs[choice].render(
                tokens, text if chunk.prompt_logprobs else chunk.text
            )
        if end is not None:
            full |= self._usage.at_end_of(choice)
        return full | ({"usage": msgspec.Raw(usage)} if self._usage.slot else {})

    def _chunk(
        self, choice: int | None, text: str = "", reason: str | None = None, stop: object = None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
        }
        if reason is not None:
            body["stop_reason"] = stop
        return self._head.chunk("text_completion", [] if choice is None else [body])


_CHOICES = (
    'must be \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": …}} or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)


def tools_and_choice(fields: ChatRequest) -> tuple[list[Tool], ToolChoice]:
    """Return the tools that may be called, and whether they must be. Raise ApiError."""
    if fields.functions is not None:
        return _functions(fields)
    if fields.function_call is not None:
        raise invalid("function_call needs functions; with tools send tool_choice", "function_call")
    choice = fields.tool_choice
    if choice in ("none", "auto", "required"):
        return fields.tools, ToolChoice(ToolMode(choice))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(fields.tools, choice.get("allowed_tools"))
    return fields.tools, ToolChoice(ToolMode.REQUIRED, _name(choice))


def _name(choice: str | dict[str, Any]) -> str:
    """Return the name in {"type": "function", "function": {"name"}}."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"tool_choice {_CHOICES}", "tool_choice")
    return name


def _allowed(tools: list[Tool], allowed: Any) -> tuple[list[Tool], ToolChoice]:
    """Return the tools of a list of names; the model does not see the others."""
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise invalid(f"tool_choice {_CHOICES}; mode is 'auto' or 'required'", "tool_choice")
    names = {_name(tool) for tool in listed}
    if unknown := names - {tool.function.name for tool in tools}:
        raise invalid(
            f"tool_choice allows {min(unknown)!r}, which is not among the tools", "tool_choice"
        )
    return [tool for tool in tools if tool.function.name in names], ToolChoice(ToolMode(mode))


def _functions(fields: ChatRequest) -> tuple[list[Tool], ToolChoice]:
    if fields.tools:
        raise invalid("functions and tools are the same field; leave functions out", "functions")
    tools = [Tool(function) for function in fields.functions or ()]
    choice = fields.function_call
    if choice is None or choice in ("none", "auto"):
        return tools, ToolChoice(ToolMode(choice or "auto"))
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise invalid("function_call must be 'none', 'auto' or {\"name\": …}", "function_call")
    return tools, ToolChoice(ToolMode.REQUIRED, name)


def with_tool_calls(messages: list[Message]) -> list[Message]:
    """Return messages whose function calls, in the older form, are tool calls with ids."""
    converted: list[Message] = []
    call_id = ""
    for index, message in enumerate(messages):
        if message.function_call is not None:
            call_id = f"call{index:05d}"
            call = ToolCall(call_id, message.function_call)
            message = Message(
                role=message.role,
                content=message.content,
                name=message.name,
                tool_calls=[*(message.tool_calls or ()), call],
                reasoning_content=message.reasoning_content or message.reasoning,
            )
        elif message.role == "function" and call_id:
            message = Message(
                role="tool", content=message.content, name=message.name, tool_call_id=call_id
            )
        converted.append(message)
    return converted


def chat_call(fields: ChatRequest, sampling: Sampling) -> ChatCall:
    """Return the chat for which a request asks. Raise ApiError for a field that is wrong.

    `sampling`: the sampling fields of the request.
    """
    _check_supported(fields)
    sampling = with_response_format(sampling, fields)
    logprobs: dict[str, Any] = {}
    if fields.logprobs:
        logprobs["logprobs"] = fields.top_logprobs
    if fields.prompt_logprobs is not None:
        logprobs["prompt_logprobs"] = fields.prompt_logprobs
    params = msgspec.structs.replace(sampling.params, **logprobs)
    tools, choice = tools_and_choice(fields)
    is_older = fields.functions is not None
    return ChatCall(
        messages=chat_prompt(with_tool_calls(fields.messages)),
        sampling=Sampling(params, sampling.names),
        tools=tools,
        tool_choice=choice,
        is_parallel=fields.parallel_tool_calls and not is_older,
        reasoning=_reasoning(fields),
        template_args=fields.chat_template_kwargs,
        continues_message=fields.continue_final_message,
        has_generation_prompt=_adds_generation_prompt(fields),
        names={"tools": "functions", "tool_choice": "function_call"} if is_older else {},
        priority=fields.priority,
        cache_salt=fields.cache_salt or "",
        cache=_cache_hint(fields, last_breakpoint(m.content for m in fields.messages)),
        stream=fields.stream,
    )


def _cache_hint(
    fields: ChatRequest | CompletionRequest, mark: PromptMark | None = None
) -> CacheHint | None:
    return openai_hint(
        fields.prompt_cache_key, fields.prompt_cache_retention, fields.prompt_cache_options, mark
    )


def _reasoning(fields: ChatRequest) -> ReasoningOptions:
    return ReasoningOptions(effort=fields.reasoning_effort, is_parsed=fields.separate_reasoning)


def _adds_generation_prompt(fields: ChatRequest) -> bool:
    """Return whether the prompt ends with the beginning of a turn. Raise ApiError."""
    if fields.continue_final_message and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt are both true: the answer either"
            " continues the last message or begins a new one; leave one out",
            "add_generation_prompt",
        )
    return not fields.continue_final_message and fields.add_generation_prompt is not False


def _check_supported(fields: ChatRequest) -> None:
    check_prompt_logprobs(fields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if fields.modalities not in (None, ["text"]):
        raise invalid("modalities must be ['text']", "modalities")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a message has beside its text.

    Attributes:
        has_reasoning: it has the reasoning, under both of the names that clients read.
        has_functions: its call is in OpenAI's older form: one function_call, without an id.
    """

    has_reasoning: bool = True
    has_functions: bool = False

    @classmethod
    def of(cls, fields: ChatRequest) -> "AnswerForm":
        """Return the form for which a request asks."""
        return cls(fields.include_reasoning, fields.functions is not None)

    def message(self, parsed: ParsedAnswer) -> AnswerMessage:
        """Return a whole message."""
        message = AnswerMessage(parsed.text or (None if parsed.calls else ""))
        calls = [
            ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in parsed.calls
        ]
        if self.has_functions and calls:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        if self.has_reasoning and parsed.reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        return message

    def finish_reason(self, reason: str) -> str:
        """Return a finish_reason by its name in this form."""
        return "function_call" if self.has_functions and reason == "tool_calls" else reason

    def reasoning(self, text: str) -> dict[str, Any] | None:
        """Return the delta of a piece of the reasoning, if there is one."""
        return {"reasoning_content": text, "reasoning": text} if self.has_reasoning else None

    def call_begin(self, index: int, begin: CallBegin) -> dict[str, Any]:
        """Return the delta of a call that begins."""
        function = {"name": begin.name, "arguments": ""}
        if self.has_functions:
            return {"function_call": function}
        call = {"index": index, "id": begin.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def arguments(self, index: int, text: str) -> dict[str, Any]:
        """Return the delta of a piece of the arguments of a call."""
        function = {"arguments": text}
        if self.has_functions:
            return {"function_call": function}
        return {"tool_calls": [{"index": index, "function": function}]}


KIND = "chat.completion.chunk"
CONTENT = "@content@"  # placeholder of the text in a chunk

_encode = msgspec.json.encode


@dataclass(slots=True)
class ChatChoiceStream:
    """The state of one choice between its chunks."""

    template: Template
    num_calls: int = 0


class ChatStream(OpenAIEnd, ChatRenderer):
    """ChatRenderer of OpenAI's chat.

    The first event of a choice has the role, the last one the finish_reason. A chunk that adds
    nothing is sent only if it is the first or last.
    """

    def __init__(
        self,
        head: ResponseHead,
        usage: StreamUsage,
        form: AnswerForm,
        prompt_ids: list[int] | None = None,
    ) -> None:
        self._head = head
        self._prompt_ids = prompt_ids
        self._form = form
        self._usage = usage
        self._choices: dict[int, ChatChoiceStream] = {}

    def start(self, num_prompt_tokens: int, _num_kept: int = 0) -> bytes:
        """Note the length of the prompt."""
        self._usage.start([num_prompt_tokens])
        if self._prompt_ids is not None:
            self._prompt_ids = last_ids(self._prompt_ids, num_prompt_tokens)
        return b""

    def render(self, index: int, events: list[AnswerEvent], chunk: StreamChunk) -> bytes:
        """Return the events of a chunk of choice `index`."""
        if self._usage.counts_reasoning:
            self._usage.count_reasoning(index, events, chunk)
        usage = self._usage.of_chunk(index, chunk)
        choice, pieces = self._choices.get(index), []
        if choice is None:
            choice = self._choices[index] = self._open(index)
            of_prompt = self._prompt_ids
            end = {} if of_prompt is None else {"prompt_token_ids": of_prompt}
            pieces.append(self._delta(index, {"role": "assistant", "content": ""}, usage, end=end))
        is_full = chunk.completion is not None or chunk.logprobs is not None
        is_full = is_full or self._prompt_ids is not None
        if len(events) == 1 and not (pieces or is_full) and type(events[0]) is TextDelta:
            return choice.template.fill(_encode(events[0].text), usage)  # nearly every chunk
        text = ""
        if is_full and events and isinstance(last := events[-1], TextDelta):
            text = last.text
            events = events[:-1]
        for part in events:
            if isinstance(part, TextDelta):
                pieces.append(choice.template.fill(_encode(part.text), usage))
            elif (delta := self._delta_of(choice, part)) is not None:
                pieces.append(self._delta(index, delta, usage))
        if is_full:
            pieces.append(self._full(index, choice, text, chunk, usage))
        elif not pieces and usage != b"null":
            pieces.append(choice.template.fill(_encode(""), usage))
        return b"".join(pieces)

    def finish(self) -> bytes:
        """Return the event with the usage of all choices, if it is asked for, and the end."""
        total = self._usage.total()
        return (event(_encode(self._head.chunk(KIND, []) | total)) if total else b"") + DONE

    def _open(self, index: int) -> ChatChoiceStream:
        chunk = self._head.chunk(KIND, [_choice(index, {"content": CONTENT})]) | self._usage.slot
        return ChatChoiceStream(Template(chunk, CONTENT, *self._usage.slot.values()))

    def _delta_of(self, choice: ChatChoiceStream, part: AnswerEvent) -> dict[str, Any] | None:
        """Return the delta of an event that is no text, if it has one."""
        match part:
            case ReasoningDelta():
                return self._form.reasoning(part.text)
            case CallBegin():
                choice.num_calls += 1
                return self._form.call_begin(choice.num_calls - 1, part)
            case ArgumentsDelta():
                return self._form.arguments(choice.num_calls - 1, part.text)
        return None

    def _full(
        self, index: int, choice: ChatChoiceStream, text: str, chunk: StreamChunk, usage: bytes
    ) -> bytes:
        """Return an event with more than text: logprobs, token ids, or the end of the choice."""
        fields: dict[str, Any] = {}
        end: dict[str, Any] = {}
        if chunk.logprobs is not None:
            has_ids = self._prompt_ids is not None
            fields["logprobs"] = chat_logprobs(chunk.logprobs, has_ids)
        if self._prompt_ids is not None:
            fields["token_ids"] = chunk.token_ids
        if chunk.completion is not None:
            reason = finish_reason(chunk.completion, choice.num_calls > 0)
            fields["finish_reason"] = self._form.finish_reason(reason)
            fields["stop_reason"] = chunk.completion.matched_stop
            end = self._usage.at_end_of(index)
        return self._delta(index, {"content": text} if text else {}, usage, fields, end)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        usage: bytes,
        fields: dict[str, Any] | None = None,
        end: dict[str, Any] | None = None,
    ) -> bytes:
        """Return an event with a delta. fields: of the choice; end: of the chunk."""
        chunk = self._head.chunk(KIND, [_choice(index, delta) | (fields or {})]) | (end or {})
        return event(_encode(chunk | ({"usage": msgspec.Raw(usage)} if self._usage.slot else {})))


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


async def chat_completions(gateway: Gateway, call: Call, sink: EventSink) -> ChatBody | None:
    """Answer a chat n times."""
    body = await call.parse()
    check_counts(body)
    sampling = take_sampling(body, CHAT, {})
    fields = convert(body, ChatRequest, CHAT)
    model = served_by(gateway, fields.model, fields.lora, fields.lora_path, call.record)
    check_receipt(fields)
    check_metadata(fields.metadata)
    chat = chat_call(fields, sampling)
    prepared = await prepare_chat(gateway, model, chat)
    head = model.head(call, "chatcmpl")
    with gateway.open_group(model, head.id, prepared.names, call.record) as group:
        stream = chat.stream or prepared.reader.needs_chunks
        group.submit(chat.messages, prepared.params, stream, prepared.options)
        prompt_ids: list[int] | None = None
        if fields.return_token_ids:
            rendered = await model.client.render(chat.messages, prepared.options["chat"])
            prompt_ids = rendered.token_ids
        if chat.stream:
            counts_reasoning = prepared.reader.separates_reasoning
            usage = StreamUsage(fields.stream_options, prepared.params.n, counts_reasoning)
            renderer = ChatStream(head, usage, AnswerForm.of(fields), prompt_ids)
            await stream_chat(sink, group, prepared, renderer)
            return None
        answers = await collect_chat(group, prepared)
        answer = _body(head, answers, AnswerForm.of(fields), fields.return_token_ids)
        if prompt_ids is not None:
            usages = [each.completion.usage for each in answers]
            answer.prompt_token_ids = last_ids(prompt_ids, usages[0].prompt_tokens)
            for choice, each in zip(answer.choices, answers, strict=True):
                choice.token_ids = each.completion.token_ids
        if fields.receipt:
            answer.receipts = await group.receipts([each.completion for each in answers])
    return answer


def _body(
    head: ResponseHead, answers: list[ChatAnswer], form: AnswerForm, has_ids: bool
) -> ChatBody:
    choices = []
    for index, answer in enumerate(answers):
        completion = answer.completion
        choices.append(
            ChatChoice(
                index,
                form.message(answer.parsed),
                form.finish_reason(answer.finish_reason),
                None
                if completion.logprobs is None
                else chat_logprobs(completion.logprobs, has_ids),
                completion.matched_stop,
            )
        )
    usage = usage_body([answer.completion.usage for answer in answers], len(answers))
    usage = usage.with_reasoning([answer.num_reasoning_tokens for answer in answers])
    timings = timings_body([answer.completion for answer in answers])
    body = ChatBody(head.id, head.created, head.model, choices, usage, timings)
    if (logprobs := answers[0].completion.prompt_logprobs) is not None:
        body.prompt_logprobs = prompt_logprobs(logprobs)
    return body


class RenderRequest(ChatRequest):
    """POST /render. prompt: a text; or messages, and the other fields of a chat."""

    prompt: str | None = None
    messages: list[Message] = msgspec.field(default_factory=list)


class RenderAnswer(msgspec.Struct):
    """A prompt: its text, its token ids, and their number."""

    prompt: str
    tokens: list[int]
    count: int


async def render(gateway: Gateway, call: Call, _: EventSink) -> RenderAnswer:
    """Return the text and the token ids that a text or a chat would have as a prompt."""
    body = await call.parse()
    check_counts(body)
    sampling = take_sampling(body, CHAT, {})
    fields = convert(body, RenderRequest, CHAT)
    model = served_by(gateway, fields.model, fields.lora, fields.lora_path, call.record)
    if (fields.prompt is None) == (not fields.messages):
        raise invalid("give either prompt or messages", "prompt")
    names = {"prompt": "prompt"}
    try:
        if fields.prompt is not None:
            rendered = await model.client.render(fields.prompt)
        else:
            chat = chat_call(fields, sampling)
            prepared = await prepare_chat(gateway, model, chat)
            names = dict(prepared.names)
            rendered = await model.client.render(chat.messages, prepared.options["chat"])
    except QuadrigaError as error:
        raise from_server(error, names) from None
    return RenderAnswer(rendered.text, rendered.token_ids, len(rendered.token_ids))


OPENAI_ENDPOINTS = [
    generating("/v1/completions", completions, "Complete prompts",
               CompletionRequest, CompletionBody, sampling=OPENAI, is_resumable=True),
    generating("/v1/chat/completions", chat_completions, "Answer a chat",
               ChatRequest, ChatBody, sampling=CHAT, is_resumable=True),
    answering("/render", render, "The prompt of a text or a chat, as text and token ids",
              RenderRequest, RenderAnswer, sampling=CHAT),
]  # fmt: skip
