"""Build a response object out of the chunks of its answer, and format it as a stream."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from http_proc.answer.events import AnswerEvent, ReasoningTokens
from http_proc.apis.responses.input import RequestTools
from http_proc.apis.responses.output import ResponseOutput, StreamEvent
from http_proc.apis.responses.schema import (
    ConversationName,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    conversation_id,
)
from http_proc.core.errors import ApiError
from http_proc.core.observe import timings_body
from http_proc.core.resumption import current_resumption
from http_proc.core.served_model import ResponseHead
from http_proc.core.streaming import END_OF_EVENT, SERVER_SENT_EVENTS, named_event
from http_proc.generation.chat_answers import ChatRenderer
from quadriga.client.types import Completion, StreamChunk
from quadriga.clock import now
from quadriga.sampling.params import SamplingParams

# Names of errors that clients of this API know, by the gateway's own.
_KNOWN_CODES = {"context_length_exceeded": "context_length_exceeded"}
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def new_response(
    head: ResponseHead, fields: ResponsesRequest, params: SamplingParams, tools: RequestTools
) -> ResponseObject:
    """Return the response to a request before its answer, with the request's fields."""
    text_format = fields.text.format
    return ResponseObject(
        id=head.id,
        created_at=head.created,
        background=fields.background,
        status="queued" if fields.background else "in_progress",
        model=head.model,
        conversation=(
            None
            if fields.conversation is None
            else ConversationName(conversation_id(fields.conversation))
        ),
        instructions=fields.instructions,
        max_output_tokens=params.max_new_tokens,
        max_tool_calls=fields.max_tool_calls,
        parallel_tool_calls=fields.parallel_tool_calls,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        prompt_cache_retention=fields.prompt_cache_retention,
        reasoning={"effort": fields.reasoning.effort, "summary": None},
        safety_identifier=fields.safety_identifier,
        temperature=params.temperature,
        text={
            "format": _without_nulls(text_format) if text_format else {"type": "text"},
            "verbosity": fields.text.verbosity or "medium",
        },
        tool_choice=fields.tool_choice,
        tools=tools.echo,
        top_logprobs=fields.top_logprobs,
        top_p=params.top_p,
        truncation=fields.truncation or "disabled",
        user=fields.user,
        metadata=fields.metadata,
    )


@dataclass(slots=True)
class ResponseAnswer:
    """A response that is being answered.

    Attributes:
        response: the response as it is now; complete after `finish` or `fail`.
    """

    response: ResponseObject
    output: ResponseOutput
    _reasoning: ReasoningTokens = field(default_factory=ReasoningTokens)

    def push(self, events: list[AnswerEvent], chunk: StreamChunk) -> list[StreamEvent]:
        """Add a chunk; `events` is what the parser read from it. Return the stream's events."""
        self._reasoning.push(events, len(chunk.token_ids))
        out = self.output.push(events, chunk.logprobs)
        if chunk.completion is not None:
            out += self._finish(chunk.completion)
        return out

    def fail(self, error: ApiError) -> None:
        """End the response with an error."""
        body, code = error.answer.error, error.answer.error.code or ""
        known = _KNOWN_CODES.get(code) or _CODES.get(error.status, "server_error")
        self.response.status = "failed"
        self.response.error = ResponseFailure(known, body.message)
        self.response.output = self.output.items

    def cancel(self) -> list[StreamEvent]:
        """End the response before its answer. Return the stream's events."""
        out = self.output.finish(is_cut=True)
        self.response.status = "cancelled"
        self.response.output = self.output.items
        return out

    def _finish(self, completion: Completion) -> list[StreamEvent]:
        response, reason = self.response, completion.finish_reason
        out = self.output.finish(is_cut=reason != "stop")
        response.output = self.output.items
        response.usage = self._usage(completion)
        response.timings = timings_body([completion])
        if reason == "length":
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        elif reason == "abort":
            response.status = "cancelled"
        else:
            response.status = "completed"
            response.completed_at = max(response.created_at, _decided_now())
        return out

    def _usage(self, completion: Completion) -> ResponseUsage:
        usage = completion.usage
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(min(self._reasoning.count, usage.completion_tokens)),
            usage.prompt_tokens + usage.completion_tokens,
        )


def _decided_now() -> int:
    """Return the Unix time at which the answer ended first."""
    resumption, seconds = current_resumption(), int(now())
    return seconds if resumption is None else int(resumption.decide("completed_at", seconds))


def _without_nulls(body: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(body)
    return {name: value for name, value in fields.items() if value is not None}


# The last event of a stream, by the response's status.
_LAST = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}

KEEPALIVE = named_event(b"keepalive", b'{"type":"keepalive"}')

_encode = msgspec.json.encode


class ResponseStream(ChatRenderer):
    """ChatRenderer of responses: named events, which are numbered from 0.

    Args:
        answer: the response.
        on_end: takes all events, and the last is left out: `last` returns it. None: they are not
            collected.
    """

    framing = replace(SERVER_SENT_EVENTS, keepalive=KEEPALIVE)

    def __init__(
        self, answer: ResponseAnswer, on_end: Callable[[bytes], None] | None = None
    ) -> None:
        self._answer = answer
        self._on_end = on_end
        self._sent: list[bytes] = []
        self._num_events = 0

    def start(self, num_prompt_tokens: int, num_kept: int = 0) -> bytes:  # noqa: ARG002
        """Return the events of the begin."""
        response, begin = self._answer.response, self._of_response("response.created")
        if response.status == "queued":
            begin += self._of_response("response.queued")
            response.status = "in_progress"
        return begin + self._of_response("response.in_progress")

    def render(self, choice: int, events: list[AnswerEvent], chunk: StreamChunk) -> bytes:  # noqa: ARG002
        """Return the events of a chunk."""
        return b"".join(map(self._event, self._answer.push(events, chunk)))

    def finish(self) -> bytes:
        """Return the event with the whole response, unless `last` does so."""
        last = self._of_response(_LAST[self._answer.response.status])
        if self._on_end is None:
            return last
        self._on_end(b"".join(self._sent))
        return b""

    def last(self) -> bytes:
        """Return the last event, with the response as it is now, after `finish`."""
        self._num_events -= 1
        return self._of_response(_LAST[self._answer.response.status])

    def take_back(self, events: bytes) -> None:
        """Let other events take the place of the last ones, which were not sent."""
        self._num_events -= events.count(END_OF_EVENT)

    def cancel(self) -> bytes:
        """Return the events that end the stream of a response that is cancelled."""
        begin = b"" if self._num_events else self.start(0)
        return begin + b"".join(map(self._event, self._answer.cancel())) + self.finish()

    def error(self, error: ApiError) -> bytes:
        """Return the error, and the event with the failed response.

        The events of the begin come first, also if the error is the first thing that happens.
        """
        begin = b"" if self._num_events else self.start(0)
        self._answer.fail(error)
        body = error.answer.error
        fields = {"code": body.code, "message": body.message, "param": body.param}
        return begin + self._event({"type": "error", **fields}) + self.finish()

    def _of_response(self, kind: str) -> bytes:
        return self._event({"type": kind, "response": self._answer.response})

    def _event(self, body: StreamEvent) -> bytes:
        kind: str = body["type"]
        data = _encode({"type": kind, "sequence_number": self._num_events, **body})
        self._num_events += 1
        out = named_event(kind.encode(), data)
        if self._on_end is not None:
            self._sent.append(out)
        return out
