"""POST /v1/completions."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.endpoints.request_body import convert, read_object
from http_proc.endpoints.usage import UsageInStream
from http_proc.gateway import GATEWAY, MAX_CHOICES, Gateway, Head
from http_proc.protocol.errors import invalid
from http_proc.protocol.logprobs import CompletionLogprobs, prompt_logprobs
from http_proc.protocol.sampling import OPENAI, check_choices, check_prompt_logprobs, take_sampling
from http_proc.protocol.schema import (
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    usage_body,
)
from http_proc.protocol.structured import take_formats
from http_proc.streaming.sse import Template, event
from http_proc.streaming.streams import stream, whole
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion, Prompt, StreamChunk
from quadriga.sampling.params import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""As OpenAI's."""

TEXT = "@text@"
"""The place of the text in a chunk."""

NAMES = {"prompt_token_ids": "prompt", "token_ids": "prompt"}
"""What the ring's fields are called here, beside the sampling fields."""

_encode = msgspec.json.encode


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete each prompt n times."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    sampling = take_sampling(body, OPENAI, {"max_new_tokens": DEFAULT_MAX_TOKENS})
    call = convert(body, CompletionRequest)
    gateway.check_model(call.model)
    sampling = take_formats(sampling, call)
    _check_supported(call, sampling.params)
    prompts = list_prompts(call.prompt)
    params, n = _params(sampling.params, call), sampling.params.n
    check_choices(n, len(prompts), MAX_CHOICES)
    head = gateway.head(request, "cmpl")
    options: RequestOptions = {"priority": call.priority}
    names = {**NAMES, **sampling.names}
    with gateway.batch(head.id, names) as batch:
        for prompt in prompts:
            batch.submit(prompt, params, call.stream, options)
        echoes = await _echoes(gateway, prompts, params.skip_special_tokens, call.echo)
        if call.stream:
            usage = UsageInStream(call.stream_options, n)
            await usage.count_prompts(gateway.ring, prompts)
            renderer = CompletionStream(head, n, echoes, usage)
            return await stream(request, batch, renderer, names)
        answers = await whole(request, batch)
    return web.Response(
        body=_encode(_body(head, n, echoes, answers, call)), content_type="application/json"
    )


def list_prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """Each prompt of the field `prompt`: a text or token ids, or a list of those."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is an empty list: send at least one prompt", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in prompt):
        raise invalid("prompt mixes token ids with other prompts: send lists of ids", "prompt")
    return list(prompt)  # type: ignore[arg-type]


def _params(params: SamplingParams, call: CompletionRequest) -> SamplingParams:
    """With the log-probabilities that are asked for; with echo also those of the prompt."""
    echoed = call.logprobs if call.echo else None
    wanted = [top for top in (echoed, call.prompt_logprobs) if top is not None]
    of_prompt = max(wanted) if wanted else None
    return msgspec.structs.replace(params, logprobs=call.logprobs, prompt_logprobs=of_prompt)


def _check_supported(call: CompletionRequest, params: SamplingParams) -> None:
    if params.max_new_tokens == 0 and not call.echo:
        raise invalid(
            "max_tokens is 0: it must be at least 1, or come with echo, for the prompt alone",
            "max_tokens",
        )
    check_prompt_logprobs(call)
    if call.best_of not in (None, 1, params.n):
        raise invalid(f"best_of is {call.best_of}: only 1 or n is supported", "best_of")
    if call.suffix:
        raise invalid("suffix is not supported by this server; leave it out", "suffix")


async def _echoes(
    gateway: Gateway, prompts: list[Prompt], skip_special_tokens: bool, echo: bool
) -> list[str]:
    """What comes before the completion of each prompt."""
    if not echo:
        return [""] * len(prompts)
    return [
        prompt
        if isinstance(prompt, str)
        else await gateway.ring.detokenize(prompt, skip_special_tokens)  # type: ignore[arg-type]
        for prompt in prompts
    ]


def _body(
    head: Head, n: int, echoes: list[str], answers: list[Completion], call: CompletionRequest
) -> CompletionBody:
    choices = []
    for index, answer in enumerate(answers):
        echo, of_prompt = echoes[index // n], answers[index - index % n].prompt_logprobs
        choice = CompletionChoice(index, echo + answer.text, answer.finish_reason)
        choice.stop_reason = answer.matched_stop
        if answer.logprobs is not None:
            told = [*((of_prompt or ()) if call.echo else ()), *answer.logprobs]
            choice.logprobs = CompletionLogprobs(0).told(told)
        if call.prompt_logprobs is not None and of_prompt is not None:
            choice.prompt_logprobs = prompt_logprobs(of_prompt)
        choices.append(choice)
    usage = usage_body([answer.usage for answer in answers], n)
    return CompletionBody(head.id, head.created, head.model, choices, usage)


class CompletionStream:
    """Chunks as events. A chunk without text is sent only if it is the first or the last."""

    def __init__(self, head: Head, n: int, echoes: list[str], usage: UsageInStream) -> None:
        self._head = head
        self._usage = usage
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._templates: dict[int, Template] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        usage = self._usage.of_chunk(choice, chunk)
        template, text = self._templates.get(choice), chunk.text
        if template is None:
            template = self._templates[choice] = Template(
                self._chunk(choice, TEXT) | self._usage.slot, TEXT, *self._usage.slot.values()
            )
            text = self._echoes[choice] + text
        elif not (text or chunk.completion or chunk.logprobs) and usage == b"null":
            return b""
        if chunk.completion is not None or chunk.logprobs is not None:
            return event(_encode(self._full(choice, text, chunk, usage)))
        return template.fill(_encode(text), usage)

    def last(self) -> bytes:
        usage = self._usage.last()
        return b"" if usage is None else event(_encode(self._chunk(None) | {"usage": usage}))

    def _full(self, choice: int, text: str, chunk: StreamChunk, usage: bytes) -> dict[str, Any]:
        """A chunk that has more than text: an end, or log-probabilities."""
        end = chunk.completion
        full = self._chunk(choice, text, *((end.finish_reason, end.matched_stop) if end else ()))
        if chunk.logprobs is not None:
            told = [*(chunk.prompt_logprobs or ()), *chunk.logprobs]
            if choice not in self._logprobs:
                offset = 0 if chunk.prompt_logprobs else len(self._echoes[choice])
                self._logprobs[choice] = CompletionLogprobs(offset)
            full["choices"][0]["logprobs"] = self._logprobs[choice].told(told)
        return full | ({"usage": msgspec.Raw(usage)} if self._usage.slot else {})

    def _chunk(
        self, choice: int | None, text: str = "", reason: str | None = None, stop: object = None
    ) -> dict[str, Any]:
        one: dict[str, Any] = {
            "index": choice,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
        }
        if reason is not None:
            one["stop_reason"] = stop
        return {
            "id": self._head.id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [] if choice is None else [one],
        }
