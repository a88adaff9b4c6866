"""POST /v1/completions."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.bodies import convert, read_object
from http_proc.errors import invalid
from http_proc.gateway import GATEWAY, MOST_CHOICES, Gateway, Head
from http_proc.logprobs import completion_logprobs
from http_proc.sampling import OPENAI, check_choices, take_sampling
from http_proc.schema import (
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    usage_body,
)
from http_proc.sse import Template, event
from http_proc.streams import stream, whole
from http_proc.usage import UsageInStream
from quadriga.async_client import RequestOptions
from quadriga.completion import Completion, Prompt, StreamChunk
from quadriga.sampling import SamplingParams

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
    _check_supported(call, sampling.params.n)
    prompts = list_prompts(call.prompt)
    params, n = _params(sampling.params, call), sampling.params.n
    check_choices(n, len(prompts), MOST_CHOICES)
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
        body=_encode(_body(head, n, echoes, answers)), content_type="application/json"
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
    of_prompt = call.logprobs if call.echo else None
    return msgspec.structs.replace(params, logprobs=call.logprobs, prompt_logprobs=of_prompt)


def _check_supported(call: CompletionRequest, n: int) -> None:
    if call.best_of not in (None, 1, n):
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


def _body(head: Head, n: int, echoes: list[str], answers: list[Completion]) -> CompletionBody:
    choices = [
        CompletionChoice(
            index,
            echoes[index // n] + answer.text,
            answer.finish_reason,
            _logprobs(answer, 0 if answer.prompt_logprobs else len(echoes[index // n])),
            answer.matched_stop,
        )
        for index, answer in enumerate(answers)
    ]
    usage = usage_body([answer.usage for answer in answers], n)
    return CompletionBody(head.id, head.created, head.model, choices, usage)


def _logprobs(answer: Completion | StreamChunk, text_offset: int) -> dict[str, Any] | None:
    """Of the prompt, where they were asked for, and of the tokens after it."""
    if answer.logprobs is None:
        return None
    return completion_logprobs([*(answer.prompt_logprobs or ()), *answer.logprobs], text_offset)


class CompletionStream:
    """Chunks as events. A chunk without text is sent only if it is the first or the last."""

    def __init__(self, head: Head, n: int, echoes: list[str], usage: UsageInStream) -> None:
        self._head = head
        self._usage = usage
        self._echoes = [echo for echo in echoes for _ in range(n)]
        self._templates: dict[int, Template] = {}
        self._sent: dict[int, int] = {}

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
        offset = self._sent.get(choice, 0 if chunk.prompt_logprobs else len(self._echoes[choice]))
        full["choices"][0]["logprobs"] = _logprobs(chunk, offset)
        self._sent[choice] = self._sent.get(choice, 0) + len(text)
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
