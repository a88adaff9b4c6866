"""Collect the events of one piece of an answer."""

from collections.abc import Iterable

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


class _Call:
    """A call while it is written, compared with those before it.

    Attributes:
        name: name of the tool.
        id: id of the call; "": it has none yet.
        pieces: its arguments so far.
        words: the arguments without the whitespace between their values.
        earlier: words of the calls of this tool that it may still repeat.
    """

    def __init__(self, name: str, call_id: str, earlier: Iterable[str]) -> None:
        self.name = name
        self.id = call_id
        self.pieces: list[str] = []
        self.earlier = list(earlier)
        self._words: list[str] = []
        self._num_chars = 0
        self._is_in_string = self._is_escaped = False

    @property
    def words(self) -> str:
        """The arguments without the whitespace between their values."""
        return "".join(self._words)

    def push(self, piece: str) -> None:
        """Add a piece of the arguments."""
        self.pieces.append(piece)
        words = self._without_space(piece)
        self._words.append(words)
        self.earlier = [e for e in self.earlier if e.startswith(words, self._num_chars)]
        self._num_chars += len(words)

    def _without_space(self, piece: str) -> str:
        kept = []
        for char in piece:
            if self._is_escaped:
                self._is_escaped = False
            elif char == '"':
                self._is_in_string = not self._is_in_string
            elif self._is_in_string:
                self._is_escaped = char == "\\"
            elif char in " \t\r\n":
                continue
            kept.append(char)
        return "".join(kept)


class EventWriter:
    """Write events. Consecutive deltas of one kind are joined.

    With `ends_at_repeat` a call with the name and the arguments of an earlier one ends the answer:
    neither that call nor anything after it is written. A call is held back while it may become
    such a repeat.

    Attributes:
        is_in_call: a call has begun and not ended.
        num_calls: number of calls that have begun, dropped ones included.
        is_over: a call was repeated.
    """

    def __init__(self, max_calls: int | None, ends_at_repeat: bool = False) -> None:
        self.is_in_call = False
        self.is_over = False
        self.num_calls = 0
        self._max_calls = max_calls
        self._ends_at_repeat = ends_at_repeat
        self._earlier: dict[str, set[str]] = {}
        self._call: _Call | None = None
        self._is_held = False
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
        if self._is_dropped:
            return
        if self._ends_at_repeat:
            self._call = _Call(name, call_id, self._earlier.get(name, ()))
            self._is_held = bool(self._call.earlier)
        if not self._is_held:
            self._begin(name, call_id)

    def arguments(self, text: str) -> None:
        """Write a piece of the arguments."""
        if self._is_dropped:
            return
        if self._call is not None:
            self._call.push(text)
        if not self._is_held:
            self._delta(ArgumentsDelta, text)
        elif self._call is not None and not self._call.earlier:
            self._release()

    def end_call(self) -> None:
        """Write the end of a call whose arguments are complete."""
        self.is_in_call = False
        if self._is_dropped:
            return
        if self._call is not None:
            earlier, words = self._earlier.setdefault(self._call.name, set()), self._call.words
            if words in earlier:
                self.is_over = True
                return
            earlier.add(words)
        self._release()
        self._flush()
        self._events.append(CallEnd())

    def leave_call(self) -> None:
        """End a call whose arguments are broken, without writing a `CallEnd`."""
        self.is_in_call = False
        if not self._is_dropped:
            self._release()

    def take(self) -> list[AnswerEvent]:
        """Return the events written since the last `take`."""
        self._flush()
        events, self._events = self._events, []
        return events

    @property
    def _is_dropped(self) -> bool:
        """Whether the call that has begun is one too many, or comes after a repeat."""
        return self.is_over or (self._max_calls is not None and self.num_calls > self._max_calls)

    def _begin(self, name: str, call_id: str) -> None:
        self._flush()
        self._events.append(CallBegin(call_id or new_call_id(), name))

    def _release(self) -> None:
        """Write a call that was held back."""
        if self._is_held and self._call is not None:
            self._is_held = False
            self._begin(self._call.name, self._call.id)
            self._delta(ArgumentsDelta, "".join(self._call.pieces))

    def _delta(self, kind: _Delta, text: str) -> None:
        if self.is_over:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._events.append(self._kind(text))
