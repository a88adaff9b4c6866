"""The handler of POST /v1/completions."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from http_proc.core.call import Call
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway, ResponseHead
from http_proc.core.streaming import (
    EventSink,
    OpenAIEvents,
    Template,
    collect,
    event,
    stream_events,
)
from http_proc.core.timings import timings_body
from http_proc.generation.logprobs import CompletionLogprobs, prompt_logprobs
from http_proc.generation.sampling import (
    OPENAI,
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
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    StreamUsage,
    check_metadata,
    last_ids,
    usage_body,
)
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion, Prompt, StreamChunk
from quadriga.sampling.params import SamplingParams
from quadriga.server.answer_format import from_info
from quadriga.server.model_info import FillFormat
from quadriga.wire.client import Accepted

# OpenAI documents it, vLLM has it, and clients of this endpoint rely on it.
DEFAULT_MAX_TOKENS = 16
TEXT = "@text@"  # placeholder of the text in a chunk
# The request's name of each field of the ring, beside the sampling fields.
NAMES = {"prompt_token_ids": "prompt", "token_ids": "prompt"}

_encode = msgspec.json.encode


async def completions(gateway: Gateway, call: Call, sink: EventSink) -> CompletionBody | None:
    """Complete each prompt n times."""
    body = await call.parse()
    sampling = take_sampling(body, OPENAI, {"max_new_tokens": DEFAULT_MAX_TOKENS})
    fields = convert(body, CompletionRequest, OPENAI)
    gateway.check_model(fields.model)
    sampling = with_response_format(sampling, fields)
    _check_supported(fields, sampling.params)
    check_receipt(fields)
    check_metadata(fields.metadata)
    prompts = list_prompts(fields.prompt)
    params, n = _params(sampling.params, fields), sampling.params.n
    if params.thinking_token_budget is not None:
        answer_format = from_info((await gateway.ring_info.static())["answer_format"])
        params = with_thinking(params, answer_format, None)
    check_choices(n, len(prompts))
    if fields.suffix:
        known = fill_format(await gateway.ring_info.static(), gateway.model, "suffix")
        prompts = _with_suffix(prompts, fields.suffix, known)
        params = fill_params(params, known)
    head = gateway.head(call, "cmpl")
    options: RequestOptions = {"priority": fields.priority}
    names = {**NAMES, **sampling.names}
    with gateway.open_group(head.id, names, call.record) as group:
        for prompt in prompts:
            group.submit(prompt, params, fields.stream, options)
        echoes = await _echoes(gateway, prompts, params.skip_special_tokens, fields.echo)
        prompt_ids = await _ids_of(gateway, prompts) if fields.return_token_ids else None
        if fields.stream:
            usage = StreamUsage(fields.stream_options, n)
            renderer = CompletionStream(head, n, echoes, usage, prompt_ids)
            await stream_events(sink, group, renderer)
            return None
        completions = await collect(group)
        answer = _body(head, n, echoes, completions, fields)
        if prompt_ids is not None:
            _add_ids(answer, n, prompt_ids, completions)
        if fields.receipt:
            answer.receipts = await group.receipts(completions)
    return answer


def list_prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """Return the prompts of the field `prompt`: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is an empty list: send at least one prompt", "prompt")
    types = set(map(type, prompt))
    if types == {int}:
        return [cast(list[int], prompt)]
    if int in types:
        raise invalid("prompt mixes token ids with other prompts: send lists of ids", "prompt")
    return cast(list[Prompt], prompt)


def _params(params: SamplingParams, call: CompletionRequest) -> SamplingParams:
    """Return the parameters with logprobs; echo adds those of the prompt."""
    echoed = call.logprobs if call.echo else None
    num_top = [num for num in (echoed, call.prompt_logprobs) if num is not None]
    return msgspec.structs.replace(
        params, logprobs=call.logprobs, prompt_logprobs=max(num_top, default=None)
    )


def _check_supported(call: CompletionRequest, params: SamplingParams) -> None:
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
    gateway: Gateway, prompts: list[Prompt], skip_special_tokens: bool, echo: bool
) -> list[str]:
    """Return the text before the completion of each prompt."""
    if not echo:
        return [""] * len(prompts)
    return [
        prompt
        if isinstance(prompt, str)
        else await gateway.ring.detokenize(cast(list[int], prompt), skip_special_tokens)
        for prompt in prompts
    ]


async def _ids_of(gateway: Gateway, prompts: list[Prompt]) -> list[list[int]]:
    """Return the token ids of prompts."""
    return [
        (await gateway.ring.render(prompt)).token_ids
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


def _body(
    head: ResponseHead,
    n: int,
    echoes: list[str],
    completions: list[Completion],
    call: CompletionRequest,
) -> CompletionBody:
    choices = []
    for index, completion in enumerate(completions):
        # The ring sends the prompt's logprobs with the first of its n choices.
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


class CompletionStream(OpenAIEvents):
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
        if not total:
            return super().finish()
        return event(_encode(self._chunk(None) | total)) + super().finish()

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
