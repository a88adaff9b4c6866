"""POST /v1/streams/ID/fork: answer the request of a resumable stream again from one of its tokens.

A fork is a request of the stream's own API, made of the stream's body: the stream's first tokens
are its `first_token_ids`, and the fields of `params` take the place of the body's. So a streamed
fork is a resumable stream as any other, and nothing behind the gateway knows of forks.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from aiohttp import web

from http_proc.apis.openai import list_prompts
from http_proc.apis.responses.endpoints import with_stored_items
from http_proc.core.call import Call, parse_object
from http_proc.core.errors import invalid
from http_proc.core.resumption import AnswerTokens
from http_proc.generation.sampling import CHAT, convert
from http_proc.generation.schema import RequestBody
from http_proc.web.endpoint import post
from http_proc.web.exchange import GATEWAY, RECORD, REQUEST_ID, read_object, send_answer
from http_proc.web.resumable import STREAMS, ResumableStream, find_stream, send_stream
from quadriga.sampling.params import GRAMMAR_FIELDS

FIRST_IDS = "first_token_ids"
# A fork has the prompt and the model of its stream.
KEPT_FIELDS = frozenset({
    "model", "lora", "lora_path", "prompt", "suffix", "messages", "system", "input", "instructions",
    "previous_response_id", "conversation", "tools", "functions", "chat_template_kwargs",
    "continue_final_message", "add_generation_prompt", "background", FIRST_IDS,
})  # fmt: skip
# Fields of all APIs that mean the same: one of `params` takes the place of all of them.
_GRAMMARS = frozenset(
    {name for name, field in CHAT.items() if field in GRAMMAR_FIELDS}
    | {"response_format", "structured_outputs"}
)
_LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})


class ForkRequest(RequestBody, kw_only=True):
    """POST /v1/streams/{id}/fork.

    at_token: number of tokens of the stream with which the answers begin; null: all so far, but the
    stop token that has ended it. next_token_ids: tokens that follow them in each answer. index: the
    choice of the stream. n: number of answers. params: fields of the stream's API in place of those
    of its request.
    """

    at_token: Annotated[int, msgspec.Meta(ge=0)] | None = None
    next_token_ids: list[int] = msgspec.field(default_factory=list)
    index: Annotated[int, msgspec.Meta(ge=0)] = 0
    n: int = 1
    params: dict[str, Any] = msgspec.field(default_factory=dict)


async def fork_stream(request: web.Request) -> web.StreamResponse:
    """Answer the request of a stream again, from one of its tokens."""
    fields = convert(await read_object(request), ForkRequest)
    if kept := KEPT_FIELDS & fields.params.keys():
        name = min(kept)
        raise invalid(
            f"params has {name}: a fork has the prompt and the model of its stream; leave it out,"
            " or send a new request",
            f"params.{name}",
        )
    stream = find_stream(request)
    body = await parse_object(stream.row.body)
    choice = _choice(body, fields.index)
    ids = [*await _first_ids(request, stream, fields), *fields.next_token_ids]
    body = _forked(body, stream, choice, fields) | ({FIRST_IDS: ids} if ids else {})
    is_stream = bool(body.get("stream"))
    if not is_stream:
        body.pop("resumable", None)
    is_named = "X-Request-Id" in request.headers
    call = Call(
        stream.row.path,
        msgspec.json.encode(body),
        request[REQUEST_ID],
        is_named,
        record=request[RECORD],
    )
    return await (send_stream if is_stream else send_answer)(request, call)


def _choice(body: Mapping[str, Any], index: int) -> int:
    """Return the number of the prompt of a choice. Raise a 400 if the stream has no such choice."""
    num_choices = body.get("n") or 1
    prompts = body.get("prompt")
    num_prompts = len(list_prompts(prompts)) if prompts else 1
    if index >= num_choices * num_prompts:
        raise invalid(
            f"index is {index}: the stream has {num_choices * num_prompts} choices, the first of"
            " which is 0",
            "index",
        )
    number: int = index // num_choices
    return number


async def _first_ids(
    request: web.Request, stream: ResumableStream, fields: ForkRequest
) -> list[int]:
    """Return the tokens with which the answers begin; wait for those that are still to come.

    Raises:
        ApiError: the stream has ended with fewer.
    """
    with request.app[GATEWAY][STREAMS].reading(stream) as log:
        await log.opened()
        answer = stream.answer
        while not log.is_ended and _is_short(stream, answer, fields):
            await log.change()
    ids = answer.of_choice[fields.index]
    if fields.at_token is None:
        ends_with_stop = len(ids) > 0 and answer.stops.get(fields.index) == ids[-1]
        return ids[: len(ids) - ends_with_stop].tolist()
    if fields.at_token > len(ids):
        raise invalid(
            f"at_token is {fields.at_token}, and choice {fields.index} of stream {stream.id} has"
            f" ended with {len(ids)} tokens: send at most {len(ids)}",
            "at_token",
        )
    return ids[: fields.at_token].tolist()


def _is_short(stream: ResumableStream, answer: AnswerTokens, fields: ForkRequest) -> bool:
    """Return whether tokens are missing that a choice will have if its stream goes on."""
    if fields.index in answer.stops:
        return False
    if fields.at_token is None:
        return stream.repeats_end
    return len(answer.of_choice[fields.index]) < fields.at_token


def _forked(
    body: dict[str, Any], stream: ResumableStream, prompt: int, fields: ForkRequest
) -> dict[str, Any]:
    """Return the body of a fork, without its first tokens.

    Args:
        body: of the stream's request.
        stream: the stream.
        prompt: number of the prompt, of those of the body.
        fields: of the fork.
    """
    body = with_stored_items(body, msgspec.json.decode(stream.row.decisions))
    if body.get("prompt"):
        body["prompt"] = list_prompts(body["prompt"])[prompt]
    replaced = set(fields.params)
    for same in (_GRAMMARS, _LENGTHS):
        if same & replaced:
            replaced |= same
    kept = {name: value for name, value in body.items() if name not in replaced}
    for name in ("n", "best_of", FIRST_IDS):
        kept.pop(name, None)
    forked = kept | fields.params | {"model": stream.row.model}
    return forked | ({"n": fields.n} if fields.n != 1 else {})


FORK_ENDPOINTS = [
    post("/v1/streams/{id}/fork", fork_stream, "Answer again from a token of a resumable stream",
         ForkRequest, dict[str, Any], streams=True),
]  # fmt: skip
