"""Answer bodies of Ollama's API, and its errors."""

from datetime import datetime, timezone
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from http_proc.protocol.errors import ApiError, QueueHint
from quadriga.client.logprobs import LikelyToken, TokenLogprob
from quadriga.client.types import Completion


class OllamaError(QueueHint):
    """The body of an answer with an error status, and the last line of a stream that fails."""

    error: str


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """Fields of every answer, and of every line of a stream; the numbers are in the last line.

    done_reason: stop, length, abort or load. The durations are in nanoseconds: of the request, of
    loading the model (0), of the prompt's computation after its time in the queue, and of the
    generation.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET

    def end(self, completion: Completion, _: list[int] | None = None) -> None:
        """Add the reason of the end, and the numbers. The second argument: the prompt's ids."""
        times, usage = completion.timings, completion.usage
        self.done, self.done_reason = True, completion.finish_reason
        self.total_duration = _nanoseconds(times.submitted, times.delivered)
        self.load_duration = 0
        self.prompt_eval_count = usage.prompt_tokens
        self.prompt_eval_duration = _nanoseconds(times.admitted, times.first_token)
        self.eval_count = usage.completion_tokens
        self.eval_duration = _nanoseconds(times.first_token, times.detokenized)


class OllamaCalledFunction(msgspec.Struct):
    """The function of a call. index: number of the call in the answer."""

    index: int
    name: str
    arguments: Any


class OllamaCall(msgspec.Struct):
    """A call by the model."""

    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The assistant's turn, or a piece of it. A call is in one piece."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """The response of POST /api/chat."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """The response of POST /api/generate.

    context: token ids of the prompt and of the answer, if the request has the field.
    """

    response: str = ""
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET

    def end(self, completion: Completion, prompt_ids: list[int] | None = None) -> None:
        """Add the reason of the end, the numbers and the context, if the prompt's ids are given."""
        OllamaAnswer.end(self, completion)
        if prompt_ids is not None:
            self.context = [*prompt_ids, *completion.token_ids]


def error_body(error: ApiError) -> bytes:
    """Return an error in Ollama's format."""
    body = OllamaError(error.answer.error.message)
    body.take_hint(error.answer.error)
    return msgspec.json.encode(body)


def rfc3339(seconds: float) -> str:
    """Return a Unix time as RFC 3339 writes it."""
    text = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")


def ollama_logprobs(tokens: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Return logprobs in Ollama's format: one object for each token."""
    return [_entry(token) | {"top_logprobs": list(map(_entry, token.top))} for token in tokens]


def _entry(token: TokenLogprob | LikelyToken) -> dict[str, Any]:
    data = token.bytes
    return {"token": data.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(data)}


def _nanoseconds(begin: float, end: float) -> int:
    """Return the time between two stages; 0 if one of them was not reached."""
    return max(0, round((end - begin) * 1e9)) if begin and end else 0
