"""What a client gives and gets: prompts, options, completions, chunks, timings."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, TypeGuard

import msgspec

from quadriga.client.logprobs import TokenLogprob
from quadriga.errors import InvalidRequest
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.public import ChatMessage, ChatOptions, Usage

Chat = list[dict[str, str]]
Prompt = str | list[int] | Chat
"""A text, its token ids, or a chat of {role, content} maps."""


NO_CHAT_OPTIONS = ChatOptions()


class RequestOptions(TypedDict, total=False):
    """What a request may say beside prompt and params, as keywords of submit, generate and stream.

    timeout: seconds until it must have ended, at most one week. Client and server both watch it;
        whoever notices first ends the request, and DeadlineExceeded is raised.
    queue_timeout: seconds until the server must have admitted it, in the same range; then
        DeadlineExceeded. None, for both: as the server was started.
    priority: larger goes first, -1000 to 1000, where the server schedules by priority.
    truncate_prompt: keep the last tokens of a prompt that is longer than the context; None: as the
        server was started.
    chat: for the chat template: tools, template_args.
    clamp_max_new_tokens: where the context leaves less than max_new_tokens, generate that much
        instead of raising PromptTooLong.
    """

    timeout: float | None
    queue_timeout: float | None
    priority: int
    truncate_prompt: bool | None
    chat: ChatOptions
    clamp_max_new_tokens: bool


def is_time_limit(timeout: float | None) -> TypeGuard[float]:
    """Whether a client watches this timeout. The server refuses what is out of its range."""
    return timeout is not None and 0 < timeout < math.inf


@dataclass(slots=True)
class Timings:
    """When the request passed each stage, in Unix seconds; 0.0 where it never came there.

    submitted and delivered are the client's, the others the server's clock, moved if the two
    disagree (see `reconcile`). token_times has the end of the step that gave each token.
    """

    submitted: float
    received: float = 0.0
    tokenized: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    detokenized: float = 0.0
    delivered: float = 0.0
    token_times: list[float] = field(default_factory=list)

    def reconcile(self) -> None:
        """Move the server's stamps into the time from submitted to delivered, if any lies outside.

        Then the server's clock is not the client's: it runs on another machine, or either wall
        clock was set after the other program had started. The stamps are moved together, so that
        as much time is left before them as after them.
        """
        stages = (self.received, self.tokenized, self.admitted, self.first_token, self.detokenized)
        stamps = [
            stamp for stamp in (*stages, *self.token_times[:1], *self.token_times[-1:]) if stamp
        ]
        if not stamps:
            return
        first, last = min(stamps), max(stamps)
        if self.submitted <= first and last <= self.delivered:
            return
        shift = (self.submitted - first + self.delivered - last) / 2

        def moved(stamp: float) -> float:
            return stamp and min(max(self.submitted, stamp + shift), self.delivered)

        self.received, self.tokenized = moved(self.received), moved(self.tokenized)
        self.admitted, self.first_token = moved(self.admitted), moved(self.first_token)
        self.detokenized = moved(self.detokenized)
        self.token_times = [moved(stamp) for stamp in self.token_times]


@dataclass(slots=True)
class Completion:
    """A finished request. finish_reason: stop, length or abort.

    index: of the choice, where `n` were asked for; others: the choices after it, in order, which
    choice 0 has when it is the answer to a whole request.
    logprobs: of token_ids, prompt_logprobs: of all tokens of the prompt; None unless asked for.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    matched_stop: str | int | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    others: "list[Completion]" = field(default_factory=list)


@dataclass(slots=True)
class StreamChunk:
    """What is new of a request. token_times: by the server's clock. received_at: Unix seconds, by
    the client's. completion: on the last chunk only.

    index: of the choice; each has a last chunk. logprobs: of token_ids; prompt_logprobs: in the
    first chunk of choice 0; None unless asked for.
    """

    request_id: str
    text: str
    token_ids: list[int]
    token_times: list[float]
    received_at: float
    completion: Completion | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


def is_list_of_prompts(prompt: Any) -> bool:
    """True for a list whose elements are prompts themselves, and for an empty list."""
    return isinstance(prompt, list | tuple) and (
        not prompt or isinstance(prompt[0], str | list | tuple)
    )


def check_is_one_prompt(prompt: Any, call: str) -> None:
    """Raise InvalidRequest for a list of prompts, such as []. call: the method that takes one."""
    if is_list_of_prompts(prompt):
        raise InvalidRequest(
            f"prompt is a list of {len(prompt)} prompts: {call} takes one prompt, call it for each",
            "prompt",
        )


class WirePrompt(NamedTuple):
    """A prompt as Generate carries it: text or chat, or packed token ids."""

    prompt: str | list[ChatMessage]
    token_ids: bytes | None = None


def wire_prompt(prompt: Any) -> WirePrompt:
    """Raises InvalidRequest for a type or value that is no prompt."""
    if isinstance(prompt, str):
        return WirePrompt(prompt)
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
        try:
            return WirePrompt(msgspec.convert(list(prompt), list[ChatMessage]))
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"prompt is no chat: {error}", "prompt") from None
    if isinstance(prompt, list | tuple):
        try:
            return WirePrompt("", pack_ids(prompt))
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"prompt is no list of token ids: {error}", "prompt") from None
    raise InvalidRequest(
        f"prompt is a {type(prompt).__name__}: it must be a string, a list of token ids, or a list"
        " of {role, content} maps",
        "prompt",
    )
