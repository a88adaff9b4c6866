"""Collect the events of one piece of an answer."""

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
    new_call_id,
)

_Delta = type[TextDelta] | type[ReasoningDelta] | type[ArgumentsDelta]


class EventWriter:
    """Write events. Consecutive deltas of one kind are joined.

    Attributes:
        is_in_call: a call has begun and not ended.
        num_calls: number of calls that have begun, dropped ones included.
    """

    def __init__(self, max_calls: int | None) -> None:
        self.is_in_call = False
        self.num_calls = 0
        self._max_calls = max_calls
        self._events: list[AnswerEvent] = []
        self._pieces: list[str] = []
        self._kind: _Delta = TextDelta

    def text(self, text: str) -> None:
        """Write a piece of the text."""
        self._delta(TextDelta, text)

    def reasoning(self, text: str) -> None:
        """Write a piece of the reasoning."""
        self._delta(ReasoningDelta, text)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Write the beginning of a call. An empty id is replaced by a new one."""
        self.is_in_call = True
        self.num_calls += 1
        if not self._is_too_many:
            self._flush()
            self._events.append(CallBegin(call_id or new_call_id(), name))

    def arguments(self, text: str) -> None:
        """Write a piece of the arguments."""
        if not self._is_too_many:
            self._delta(ArgumentsDelta, text)

    def end_call(self) -> None:
        """Write the end of a call whose arguments are complete."""
        self.is_in_call = False
        if not self._is_too_many:
            self._flush()
            self._events.append(CallEnd())

    def leave_call(self) -> None:
        """End a call whose arguments are broken, without writing a `CallEnd`."""
        self.is_in_call = False

    def take(self) -> list[AnswerEvent]:
        """Return the events written since the last `take`."""
        self._flush()
        events, self._events = self._events, []
        return events

    @property
    def _is_too_many(self) -> bool:
        return self._max_calls is not None and self.num_calls > self._max_calls

    def _delta(self, kind: _Delta, text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._events.append(self._kind(text))
