"""Format the answers to a chat as server-sent events."""

from dataclasses import dataclass
from typing import Any

import msgspec

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    ReasoningDelta,
    TextDelta,
)
from http_proc.apis.openai.answer_form import AnswerForm
from http_proc.apis.openai.usage import StreamUsage
from http_proc.chat.answers import finish_reason
from http_proc.gateway import ResponseHead
from http_proc.protocol.errors import ApiError
from http_proc.protocol.logprobs import chat_logprobs
from http_proc.protocol.schema import last_ids
from http_proc.responses import DONE, SERVER_SENT_EVENTS, Template, event
from quadriga.client.types import StreamChunk

KIND = "chat.completion.chunk"
CONTENT = "@content@"  # placeholder of the text in a chunk

_encode = msgspec.json.encode


@dataclass(slots=True)
class ChatChoiceStream:
    """The state of one choice between its chunks."""

    template: Template
    num_calls: int = 0


class ChatStream:
    """ChatRenderer of OpenAI's chat.

    The first event of a choice has the role, the last one the finish_reason. A chunk that adds
    nothing is sent only if it is the first or last.
    """

    framing = SERVER_SENT_EVENTS

    def __init__(
        self,
        head: ResponseHead,
        usage: StreamUsage,
        form: AnswerForm,
        prompt_ids: list[int] | None = None,
    ) -> None:
        self._head = head
        self._prompt_ids = prompt_ids
        self._form = form
        self._usage = usage
        self._choices: dict[int, ChatChoiceStream] = {}

    def start(self, num_prompt_tokens: int) -> bytes:
        """Note the length of the prompt."""
        self._usage.start([num_prompt_tokens])
        if self._prompt_ids is not None:
            self._prompt_ids = last_ids(self._prompt_ids, num_prompt_tokens)
        return b""

    def render(self, index: int, events: list[AnswerEvent], chunk: StreamChunk) -> bytes:
        """Return the events of a chunk of choice `index`."""
        if self._usage.counts_reasoning:
            self._usage.count_reasoning(index, events, chunk)
        usage = self._usage.of_chunk(index, chunk)
        choice, pieces = self._choices.get(index), []
        if choice is None:
            choice = self._choices[index] = self._open(index)
            of_prompt = self._prompt_ids
            end = {} if of_prompt is None else {"prompt_token_ids": of_prompt}
            pieces.append(self._delta(index, {"role": "assistant", "content": ""}, usage, end=end))
        is_full = chunk.completion is not None or chunk.logprobs is not None
        is_full = is_full or self._prompt_ids is not None
        if len(events) == 1 and not (pieces or is_full) and type(events[0]) is TextDelta:
            return choice.template.fill(_encode(events[0].text), usage)  # nearly every chunk
        text = ""
        if is_full and events and isinstance(last := events[-1], TextDelta):
            text = last.text
            events = events[:-1]
        for part in events:
            if isinstance(part, TextDelta):
                pieces.append(choice.template.fill(_encode(part.text), usage))
            elif (delta := self._delta_of(choice, part)) is not None:
                pieces.append(self._delta(index, delta, usage))
        if is_full:
            pieces.append(self._full(index, choice, text, chunk, usage))
        elif not pieces and usage != b"null":
            pieces.append(choice.template.fill(_encode(""), usage))
        return b"".join(pieces)

    def finish(self) -> bytes:
        """Return the event with the usage of all choices, if it is asked for, and the end."""
        total = self._usage.total()
        if not total:
            return DONE
        return event(_encode(self._head.chunk(KIND, []) | total)) + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the error and the end."""
        return event(error.body()) + DONE

    def _open(self, index: int) -> ChatChoiceStream:
        chunk = self._head.chunk(KIND, [_choice(index, {"content": CONTENT})]) | self._usage.slot
        return ChatChoiceStream(Template(chunk, CONTENT, *self._usage.slot.values()))

    def _delta_of(self, choice: ChatChoiceStream, part: AnswerEvent) -> dict[str, Any] | None:
        """Return the delta of an event that is no text, if it has one."""
        match part:
            case ReasoningDelta():
                return self._form.reasoning(part.text)
            case CallBegin():
                choice.num_calls += 1
                return self._form.call_begin(choice.num_calls - 1, part)
            case ArgumentsDelta():
                return self._form.arguments(choice.num_calls - 1, part.text)
        return None

    def _full(
        self, index: int, choice: ChatChoiceStream, text: str, chunk: StreamChunk, usage: bytes
    ) -> bytes:
        """Return an event with more than text: logprobs, token ids, or the end of the choice."""
        fields: dict[str, Any] = {}
        end: dict[str, Any] = {}
        if chunk.logprobs is not None:
            fields["logprobs"] = chat_logprobs(chunk.logprobs)
        if self._prompt_ids is not None:
            fields["token_ids"] = chunk.token_ids
        if chunk.completion is not None:
            reason = finish_reason(chunk.completion, choice.num_calls > 0)
            fields["finish_reason"] = self._form.finish_reason(reason)
            fields["stop_reason"] = chunk.completion.matched_stop
            end = self._usage.at_end_of(index)
        return self._delta(index, {"content": text} if text else {}, usage, fields, end)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        usage: bytes,
        fields: dict[str, Any] | None = None,
        end: dict[str, Any] | None = None,
    ) -> bytes:
        """Return an event with a delta. fields: of the choice; end: of the chunk."""
        chunk = self._head.chunk(KIND, [_choice(index, delta) | (fields or {})]) | (end or {})
        return event(_encode(chunk | ({"usage": msgspec.Raw(usage)} if self._usage.slot else {})))


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
