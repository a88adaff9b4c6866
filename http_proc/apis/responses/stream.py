"""Format a response as server-sent events."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from http_proc.answer.events import AnswerEvent
from http_proc.apis.responses.answer import ResponseAnswer
from http_proc.apis.responses.output_items import StreamEvent
from http_proc.protocol.errors import ApiError
from http_proc.responses import END_OF_EVENT, SERVER_SENT_EVENTS, named_event
from quadriga.client.types import StreamChunk

# The last event of a stream, by the response's status.
_LAST = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}

KEEPALIVE = named_event(b"keepalive", b'{"type":"keepalive"}')

_encode = msgspec.json.encode


class ResponseStream:
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

    def start(self, num_prompt_tokens: int) -> bytes:  # noqa: ARG002
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
