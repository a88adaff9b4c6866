"""Events of an answer, in the order in which the model writes them, and the whole answer.

`EventWriter` collects the events of one piece of an answer, `ReasoningTokens` counts the tokens of
the reasoning by them.
"""

import string
from collections.abc import Iterable
from dataclasses import dataclass, field

from http_proc.core.resumption import id_chars

_ID_ALPHABET = string.ascii_letters + string.digits
# Mistral's templates accept no other length.
ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call, with its whole name."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of the call that began last: its arguments are complete."""


AnswerEvent = TextDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd


@dataclass(slots=True)
class ParsedCall:
    """A tool call.

    Attributes:
        id: id of the call, from the model or made by the gateway.
        name: name of the tool.
        arguments: JSON text, cut off or broken unless `is_complete`.
        is_complete: the model has written the arguments to their end.
    """

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer.

    Attributes:
        text: the answer proper.
        reasoning: the text of the reasoning, without its marks.
        calls: tool calls in order.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Add the next events."""
        for event in events:
            match event:
                case TextDelta():
                    self.text += event.text
                case ReasoningDelta():
                    self.reasoning += event.text
                case CallBegin():
                    self.calls.append(ParsedCall(event.id, event.name))
                case ArgumentsDelta():
                    self.calls[-1].arguments += event.text
                case CallEnd():
                    self.calls[-1].is_complete = True


def new_call_id() -> str:
    """Return a new id of a tool call."""
    return id_chars(ID_LENGTH, _ID_ALPHABET)


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


class HeldCalls(EventWriter):
    """Collect calls that may turn out to be text. They have no ids of their own yet."""

    def __init__(self) -> None:
        super().__init__(max_calls=None)

    def _begin(self, name: str, call_id: str) -> None:
        self._flush()
        self._events.append(CallBegin(call_id, name))


class ReasoningTokens:
    """Count the tokens of the chunks whose text is reasoning or a mark around it.

    The count is exact if the server sends a chunk for each token. A chunk of several tokens in
    which the reasoning ends counts as reasoning.

    Attributes:
        is_exact: no chunk of several tokens had both reasoning and other parts.
    """

    def __init__(self) -> None:
        self._num_counted = 0
        self._num_undecided = 0
        self._is_open = False
        self.is_exact = True

    @property
    def count(self) -> int:
        """Number of tokens of the reasoning so far."""
        return self._num_counted + (self._num_undecided if self._is_open else 0)

    def push(self, events: list[AnswerEvent], num_tokens: int) -> None:
        """Count the tokens of a chunk; `events` is what the parser read from its text."""
        if not events:
            # The text may be a part of a mark, or of a character.
            self._num_undecided += num_tokens
            return
        has_reasoning = any(isinstance(event, ReasoningDelta) for event in events)
        if has_reasoning or self._is_open:
            self._num_counted += self._num_undecided
        if has_reasoning:
            self._num_counted += num_tokens
            is_mixed = not all(isinstance(event, ReasoningDelta) for event in events)
            self.is_exact = self.is_exact and (num_tokens <= 1 or not is_mixed)
        self._num_undecided = 0
        self._is_open = isinstance(events[-1], ReasoningDelta)
