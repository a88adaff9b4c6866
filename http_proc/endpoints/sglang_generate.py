"""POST /generate, in SGLang's shape."""

from typing import Annotated, Any

import msgspec
from aiohttp import web

from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, MAX_CHOICES
from http_proc.observe.request_log import RECORD
from http_proc.protocol.errors import invalid
from http_proc.protocol.sampling import NATIVE, check_choices, take_sampling
from http_proc.protocol.schema import Priority, Request, Top
from http_proc.streaming.sse import event
from http_proc.streaming.streams import stream, whole
from quadriga.client.async_client import RequestOptions
from quadriga.client.logprobs import TokenLogprob
from quadriga.client.types import Completion, Prompt, StreamChunk
from quadriga.sampling.params import SamplingParams

NAMES = {"prompt": "text", "prompt_token_ids": "input_ids"}

Start = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]

_encode = msgspec.json.encode


class GenerateRequest(Request):
    """text, or input_ids: one prompt, or a list of them. rid: a name for /abort_request.

    sampling_params: by SGLang's names; max_new_tokens 0 computes the prompt alone. return_logprob:
    of the generated tokens, with as many of the likeliest as top_logprobs_num says; with
    logprob_start_len 0 or more also of the prompt's from there on.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    stream: bool = False
    rid: str | None = None
    priority: Priority = 0
    return_logprob: bool = False
    top_logprobs_num: Top = 0
    logprob_start_len: Start = -1


class GenerateAnswer(msgspec.Struct):
    """What one choice came to. meta_info: counts, reason and log-probabilities."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


async def generate(request: web.Request) -> web.StreamResponse:
    """Complete each prompt n times; a list of prompts, or n over 1, is answered by a list."""
    gateway = request.app[GATEWAY]
    call = convert(await read_object(request), GenerateRequest)
    prompts, single = _prompts(call)
    fields = dict(call.sampling_params)
    sampling = take_sampling(fields, NATIVE, {})
    if fields:
        name = next(iter(fields))
        raise invalid(f"{name} is not supported by this server; leave it out", name)
    params, n = _params(sampling.params, call), sampling.params.n
    check_choices(n, len(prompts), MAX_CHOICES)
    rid = request[RECORD].id = call.rid or gateway.head(request, "gen").id
    if gateway.is_live(rid):
        raise invalid(f"rid {rid!r} is being answered already: choose another one", "rid")
    options: RequestOptions = {"priority": call.priority}
    single = single and n == 1
    names = {**NAMES, **sampling.names}
    with gateway.batch(rid, names) as batch:
        for prompt in prompts:
            batch.submit(prompt, params, call.stream, options)
        if call.stream:
            renderer = GenerateStream(rid, single, call.logprob_start_len)
            return await stream(request, batch, renderer, names)
        answers = await whole(request, batch)
    bodies = [_answer(rid, answer, call.logprob_start_len) for answer in answers]
    return web.Response(
        body=_encode(bodies[0] if single else bodies), content_type="application/json"
    )


def _prompts(call: GenerateRequest) -> tuple[list[Prompt], bool]:
    """The prompts, and whether there is one that is no list."""
    if (call.text is None) == (call.input_ids is None):
        raise invalid("give either text or input_ids", "text")
    if call.text is not None:
        if not call.text:
            raise invalid("text is an empty list: send at least one prompt", "text")
        return ([call.text], True) if isinstance(call.text, str) else (list(call.text), False)
    ids = call.input_ids or []
    if all(isinstance(item, int) for item in ids):
        return [ids], True  # type: ignore[list-item]
    if any(isinstance(item, int) for item in ids):
        raise invalid("input_ids mixes ids and lists of ids", "input_ids")
    return list(ids), False  # type: ignore[arg-type]


def _params(params: SamplingParams, call: GenerateRequest) -> SamplingParams:
    """With the log-probabilities that are asked for."""
    if not call.return_logprob:
        return params
    of_prompt = call.top_logprobs_num if call.logprob_start_len >= 0 else None
    return msgspec.structs.replace(
        params, logprobs=call.top_logprobs_num, prompt_logprobs=of_prompt
    )


def _answer(rid: str, answer: Completion, start: int) -> GenerateAnswer:
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _finish_reason(answer),
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": answer.usage.completion_tokens,
        "cached_tokens": answer.usage.cached_tokens,
        "e2e_latency": answer.timings.delivered - answer.timings.submitted,
    }
    meta |= _logprobs(answer, start)
    return GenerateAnswer(answer.text, answer.token_ids, meta)


def _logprobs(item: Completion | StreamChunk, start: int) -> dict[str, list[Any]]:
    """Of the generated tokens and of the prompt from `start` on, where they are told."""
    found: dict[str, list[Any]] = {}
    if item.logprobs is not None:
        found |= _listed("output", item.logprobs)
    if item.prompt_logprobs is not None:
        found |= _listed("input", item.prompt_logprobs[start:])
    return found


def _listed(of: str, told: list[TokenLogprob]) -> dict[str, list[Any]]:
    """As SGLang has them: [log-probability, token id, text]."""
    tokens = [[one.logprob, one.token_id, one.text] for one in told]
    top = [[[t.logprob, t.token_id, t.bytes.decode("utf-8", "replace")] for t in one.top]
           for one in told]  # fmt: skip
    return {f"{of}_token_logprobs": tokens, f"{of}_top_logprobs": top}


def _finish_reason(answer: Completion) -> dict[str, Any]:
    if answer.finish_reason == "length":
        return {"type": "length", "length": answer.usage.completion_tokens}
    if answer.finish_reason == "stop":
        return {"type": "stop", "matched": answer.matched_stop}
    return {"type": answer.finish_reason}


class GenerateStream:
    """Each event has all the text so far, as SGLang's."""

    def __init__(self, rid: str, single: bool, start: int) -> None:
        self._rid = rid
        self._start = start
        self._single = single
        self._texts: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}
        self._told: dict[int, dict[str, list[Any]]] = {}

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        if chunk.completion is not None:
            answer = _answer(self._rid, chunk.completion, self._start)
        else:
            answer = self._so_far(choice, chunk)
        index = {} if self._single else {"index": choice}
        return event(_encode(msgspec.structs.asdict(answer) | index))

    def _so_far(self, choice: int, chunk: StreamChunk) -> GenerateAnswer:
        text = self._texts[choice] = self._texts.get(choice, "") + chunk.text
        ids = self._ids.setdefault(choice, [])
        ids += chunk.token_ids
        meta: dict[str, Any] = {"id": self._rid, "finish_reason": None}
        meta["completion_tokens"] = len(ids)
        told = self._told.setdefault(choice, {})
        for name, entries in _logprobs(chunk, self._start).items():
            told[name] = told.get(name, []) + entries
        meta |= told
        return GenerateAnswer(text, ids, meta)

    def last(self) -> bytes:
        return b""
