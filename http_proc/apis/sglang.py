"""The handler of POST /generate, SGLang's own endpoint."""

from typing import Annotated, Any, NamedTuple, cast

import msgspec

from http_proc.apis.adapters import served_by
from http_proc.core.call import Call
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.observe import timings_body
from http_proc.core.streaming import EventSink, OpenAIEnd, Renderer, collect, event, stream_events
from http_proc.generation.sampling import SGLANG, check_choices, convert, take_sampling
from http_proc.generation.schema import Priority, RequestBody, Top
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion, Prompt, StreamChunk, TokenLogprob
from quadriga.sampling.params import SamplingParams

# The request's name of each field of the server.
NAMES = {
    "prompt": "text",
    "prompt_token_ids": "input_ids",
    "logprob_token_ids": "token_ids_logprob",
}

Start = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]

_encode = msgspec.json.encode


class GenerateRequest(RequestBody):
    """POST /generate.

    text, or input_ids: one prompt, or a list of them. rid: an id for /abort_request.
    sampling_params: by SGLang's names; max_new_tokens 0 computes the prompt alone. return_logprob:
    return the logprob of each generated token, with top_logprobs_num top tokens. logprob_start_len:
    if 0 or more, also the logprobs of the prompt from this token on. token_ids_logprob: ids whose
    logprobs are returned for each generated token. model: of a server with several.
    lora_path: name of the adapter that answers.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    stream: bool = False
    rid: str | None = None
    model: str | None = None
    lora_path: str | None = None
    priority: Priority = 0
    return_logprob: bool = False
    top_logprobs_num: Top = 0
    logprob_start_len: Start = -1
    token_ids_logprob: list[int] | None = None


class GenerateAnswer(msgspec.Struct):
    """One choice. meta_info: token counts, finish reason and logprobs."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


async def generate(
    gateway: Gateway, call: Call, sink: EventSink
) -> GenerateAnswer | list[GenerateAnswer] | None:
    """Complete each prompt n times. The answer to a list of prompts, or to n > 1, is a list."""
    fields = convert(await call.parse(), GenerateRequest)
    model = served_by(gateway, fields.model, [], fields.lora_path, call.record)
    prompts, single = _prompts(fields)
    given = dict(fields.sampling_params)
    sampling = take_sampling(given, SGLANG, {})
    if given:
        name = next(iter(given))
        raise invalid(f"{name} is not supported by this server; leave it out", name)
    params, n = _params(sampling.params, fields), sampling.params.n
    check_choices(n, len(prompts))
    rid = call.record.id = fields.rid or model.head(call, "gen").id
    if gateway.is_open(rid):
        raise invalid(f"rid {rid!r} is being answered already: choose another one", "rid")
    options: RequestOptions = {"priority": fields.priority}
    single = single and n == 1
    names = {**NAMES, **sampling.names}
    logprobs = LogprobLists(fields.logprob_start_len, len(params.logprob_token_ids))
    with gateway.open_group(model, rid, names, call.record) as group:
        for prompt in prompts:
            group.submit(prompt, params, fields.stream, options)
        if fields.stream:
            renderer = GenerateStream(rid, single, logprobs)
            await stream_events(sink, group, renderer)
            return None
        completions = await collect(group)
    answers = [_answer(rid, completion, logprobs) for completion in completions]
    return answers[0] if single else answers


def _prompts(call: GenerateRequest) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether the request has a single one outside of a list."""
    if (call.text is None) == (call.input_ids is None):
        raise invalid("give either text or input_ids", "text")
    if call.text is not None:
        if not call.text:
            raise invalid("text is an empty list: send at least one prompt", "text")
        return ([call.text], True) if isinstance(call.text, str) else (list(call.text), False)
    ids = call.input_ids or []
    types = set(map(type, ids))
    if types <= {int}:
        return [cast(list[int], ids)], True
    if int in types:
        raise invalid("input_ids mixes ids and lists of ids", "input_ids")
    return cast(list[Prompt], ids), False


def _params(params: SamplingParams, call: GenerateRequest) -> SamplingParams:
    """Return the parameters with logprobs."""
    if call.token_ids_logprob and not call.return_logprob:
        raise invalid("token_ids_logprob needs return_logprob: true", "token_ids_logprob")
    if not call.return_logprob:
        return params
    num_prompt_top = call.top_logprobs_num if call.logprob_start_len >= 0 else None
    return msgspec.structs.replace(
        params,
        logprobs=call.top_logprobs_num,
        prompt_logprobs=num_prompt_top,
        logprob_token_ids=call.token_ids_logprob or [],
    )


def _answer(rid: str, completion: Completion, logprobs: "LogprobLists") -> GenerateAnswer:
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": _finish_reason(completion),
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "cached_tokens": completion.usage.cached_tokens,
        "e2e_latency": completion.timings.delivered - completion.timings.submitted,
        "timings": timings_body([completion]),
    }
    meta |= logprobs.of(completion)
    return GenerateAnswer(completion.text, completion.token_ids, meta)


class LogprobLists(NamedTuple):
    """SGLang's lists of logprobs, with [logprob, token id, text] for each token.

    Attributes:
        start: the first token of the prompt that is in them.
        num_chosen: number of ids whose logprobs were asked for, for each generated token.
    """

    start: int
    num_chosen: int

    def of(self, item: Completion | StreamChunk) -> dict[str, list[Any]]:
        """Return the logprobs of the generated tokens, and of the prompt's."""
        lists: dict[str, list[Any]] = {}
        if item.logprobs is not None:
            lists |= _lists("output", item.logprobs, self.num_chosen)
        if item.prompt_logprobs is not None:
            lists |= _lists("input", item.prompt_logprobs[self.start :], 0)
        return lists


def _lists(prefix: str, tokens: list[TokenLogprob], num_chosen: int) -> dict[str, list[Any]]:
    """Return the lists of some tokens, the last `num_chosen` of whose top tokens were chosen."""
    top = [
        [[like.logprob, like.token_id, like.bytes.decode("utf-8", "replace")] for like in token.top]
        for token in tokens
    ]
    num_top = [len(entries) - num_chosen for entries in top]
    lists: dict[str, list[Any]] = {
        f"{prefix}_token_logprobs": [[tok.logprob, tok.token_id, tok.text] for tok in tokens],
        f"{prefix}_top_logprobs": [e[:n] for e, n in zip(top, num_top, strict=True)],
    }
    if num_chosen:
        chosen = [e[n:] for e, n in zip(top, num_top, strict=True)]
        lists[f"{prefix}_token_ids_logprobs"] = chosen
    return lists


def _finish_reason(completion: Completion) -> dict[str, Any]:
    if completion.finish_reason == "length":
        return {"type": "length", "length": completion.usage.completion_tokens}
    if completion.finish_reason == "stop":
        return {"type": "stop", "matched": completion.matched_stop}
    return {"type": completion.finish_reason}


class GenerateStream(OpenAIEnd, Renderer):
    """Renderer of /generate: each event has the whole text so far, like SGLang's."""

    def __init__(self, rid: str, single: bool, logprobs: LogprobLists) -> None:
        self._rid = rid
        self._lists = logprobs
        self._single = single
        self._texts: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, dict[str, list[Any]]] = {}

    def render(self, choice: int, chunk: StreamChunk) -> bytes:
        """Return the event of a chunk."""
        if chunk.completion is not None:
            answer = _answer(self._rid, chunk.completion, self._lists)
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
        logprobs = self._logprobs.setdefault(choice, {})
        for name, entries in self._lists.of(chunk).items():
            logprobs[name] = logprobs.get(name, []) + entries
        return GenerateAnswer(text, ids, meta | logprobs)
