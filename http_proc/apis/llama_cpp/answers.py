"""Format completions as llama.cpp does: one body, or server-sent events."""

from collections.abc import Sequence
from typing import Any

import msgspec

from http_proc.apis.llama_cpp.bodies import InfillAnswer, InfillTimings, error_body
from http_proc.protocol.errors import ApiError
from http_proc.responses import SERVER_SENT_EVENTS, event
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.to_client import Accepted, Usage

_encode = msgspec.json.encode


def infill_answer(
    model: str, completion: Completion, params: SamplingParams, content: str
) -> InfillAnswer:
    """Return the answer to a completion with the given content."""
    usage, matched = completion.usage, completion.matched_stop
    word = matched if isinstance(matched, str) else ""
    answer = InfillAnswer(
        content=content,
        tokens=completion.token_ids,
        model=model,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.prompt_tokens + usage.completion_tokens,
        stop_type="limit" if completion.finish_reason == "length" else "word" if word else "eos",
        stopping_word=word,
        timings=_timings(completion.timings, usage),
        has_new_line="\n" in completion.text,
    )
    if params.logprobs is not None and completion.logprobs is not None:
        answer.completion_probabilities = _probabilities(completion)
    return answer


def _probabilities(completion: Completion) -> list[dict[str, Any]]:
    def entry(token_id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
        text = data.decode("utf-8", "replace")
        return {"id": token_id, "token": text, "bytes": list(data), "logprob": logprob}

    return [
        entry(token.token_id, token.bytes, token.logprob)
        | {"top_logprobs": [entry(top.token_id, top.bytes, top.logprob) for top in token.top]}
        for token in completion.logprobs or []
    ]


def _timings(timings: Timings, usage: Usage) -> InfillTimings:
    prompt_ms = max(0.0, timings.first_token - timings.admitted) * 1000
    predicted_ms = max(0.0, timings.detokenized - timings.first_token) * 1000
    num_computed, num_new = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    return InfillTimings(
        usage.cached_tokens,
        num_computed,
        prompt_ms,
        prompt_ms / max(1, num_computed),
        num_computed / prompt_ms * 1000 if prompt_ms else 0.0,
        num_new,
        predicted_ms,
        predicted_ms / max(1, num_new),
        num_new / predicted_ms * 1000 if predicted_ms else 0.0,
    )


def selected(answer: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Return the asked-for fields of an answer, under the paths that the request names them by."""
    if not fields:
        return answer
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for key in path.split("/"):
            value = value.get(key, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            found[path] = value
    return found


class InfillStream:
    """Renderer of /infill: an event for each chunk, then one with the numbers and no text."""

    framing = SERVER_SENT_EVENTS

    def __init__(self, model: str, params: SamplingParams, fields: list[str] | None) -> None:
        self._model = model
        self._params = params
        self._fields = fields
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def start(self, accepted: Sequence[Accepted]) -> bytes:
        """Note the length of the prompt."""
        self._num_prompt_tokens = accepted[0].num_prompt_tokens
        return b""

    def render(self, _: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk."""
        self._num_tokens += len(chunk.token_ids)
        pieces = []
        if chunk.text:
            part = {
                "index": 0,
                "content": chunk.text,
                "tokens": chunk.token_ids,
                "stop": False,
                "id_slot": 0,
                "tokens_predicted": self._num_tokens,
                "tokens_evaluated": self._num_prompt_tokens,
            }
            pieces.append(event(_encode(part)))
        if chunk.completion is not None:
            answer = infill_answer(self._model, chunk.completion, self._params, "")
            answer.tokens = []
            pieces.append(event(_encode(selected(msgspec.to_builtins(answer), self._fields))))
        return b"".join(pieces)

    def finish(self) -> bytes:
        """Return nothing: the last event of the text ends the stream."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error_body(error))
