"""Types of the client library: prompts, options, completions, chunks, log-probabilities, timings.

In order: log-probabilities in the form that a client reads, the checks of a call's arguments with
errors in the caller's words, and the other types.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict, TypeGuard

import msgspec

from quadriga.client.receipts import Receipt
from quadriga.errors import InvalidRequest
from quadriga.keywords import check_keywords
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.validation import shown_number
from quadriga.wire.cache import CacheHint
from quadriga.wire.client import ChatMessage, ChatOptions, Generate, Usage
from quadriga.wire.logprobs import Logprobs, PromptLogprobs
from quadriga.wire.packing import pack_ids, unpack_floats, unpack_ids


class LikelyToken(NamedTuple):
    """One of the likeliest tokens at its position.

    Attributes:
        bytes: text of the token, perhaps a part of a character.
    """

    token_id: int
    logprob: float
    bytes: bytes


@dataclass(slots=True)
class TokenLogprob:
    """A token and its log-probability in the model's own distribution, as a natural logarithm.

    Attributes:
        logprob: None for the first token of a prompt.
        bytes: text of the token, perhaps a part of a character.
        top: the requested number of likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float | None
    bytes: bytes
    top: list[LikelyToken]

    @property
    def text(self) -> str:
        """Text of the token, with U+FFFD for a part of a character."""
        return self.bytes.decode("utf-8", "replace")


def read_logprobs(token_ids: list[int], data: Logprobs) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens, one item per token id."""
    width = data.width
    likeliest = [
        LikelyToken(*entry)
        for entry in zip(
            unpack_ids(data.top_ids), unpack_floats(data.top_values), data.top_pieces, strict=True
        )
    ]
    return [
        TokenLogprob(
            token_id,
            None if math.isnan(value) else value,
            piece,
            [top for top in likeliest[index * width : (index + 1) * width] if top.token_id >= 0],
        )
        for index, (token_id, value, piece) in enumerate(
            zip(token_ids, unpack_floats(data.values), data.pieces, strict=True)
        )
    ]


def read_prompt_logprobs(data: PromptLogprobs) -> list[TokenLogprob]:
    """Return the log-probabilities of all tokens of a prompt."""
    return read_logprobs(unpack_ids(data.token_ids).tolist(), data.logprobs)


# Chat templates may know further roles, so that only a misspelt one of these is refused.
COMMON_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_SHOWN_CHARS = 40
# Fields of messages whose values are any JSON.
JSON_FIELDS = ("tools", "template_args", "tool_calls", "json_schema", "structural_tag")


def shown(value: Any) -> str:
    """Return a value and its type for an error message: `5, an int`."""
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    text = repr(value)
    return f"{article} {kind}" if len(text) > MAX_SHOWN_CHARS else f"{text}, {article} {kind}"


def check_options(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword that a call does not have; sampling fields get a hint."""
    known = list(known)
    for name in given:
        if name == "sampling_params":
            raise TypeError(f"{call}() has no keyword 'sampling_params': it is called params here")
        if name not in known and hasattr(SamplingParams, name):
            raise TypeError(
                f"{call}() has no keyword {name!r}: it is a field of SamplingParams, as in"
                f" {call}(prompt, SamplingParams({name}=…))"
            )
    check_keywords(call, given, known)


def params_of_each(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters of each prompt; a single SamplingParams or None is for all of them."""
    if not isinstance(params, list | tuple):
        return [checked_params(params)] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"params is a list of {len(params)} for {num_prompts} prompts: give one SamplingParams"
            " for all prompts, or one for each",
            "params",
        )
    return [checked_params(item) for item in params]


def checked_params(params: Any) -> SamplingParams:
    """Return sampling parameters, the defaults for None. Raise InvalidRequest for another type."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    example = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams(seed=1)"
    raise InvalidRequest(
        f"params is {shown(params)}: it must be a SamplingParams, as in {example}", "params"
    )


def check_is_chat(messages: Any) -> None:
    """Raise InvalidRequest unless a value is a chat or a list of chats."""
    chats = [messages] if not _is_list(messages) or not all(map(_is_list, messages)) else messages
    for chat in chats:
        if not _is_list(chat) or not chat or not isinstance(chat[0], dict):
            raise InvalidRequest(
                f"messages is {shown(chat)}: a chat is a list of maps, as in"
                ' [{"role": "user", "content": "Hello!"}]',
                "messages",
            )


def checked_chat(chat: Sequence[Any]) -> list[ChatMessage]:
    """Return the turns of a chat. Raise InvalidRequest for a wrong turn or a misspelt role."""
    try:
        turns = msgspec.convert(list(chat), list[ChatMessage])
    except msgspec.ValidationError:
        raise _wrong_turn(chat) from None
    for index, turn in enumerate(turns):
        if turn.role not in COMMON_ROLES and (near := get_close_matches(turn.role, COMMON_ROLES)):
            raise InvalidRequest(
                f"turn {index} of the chat has the role {turn.role!r}: is it {near[0]!r}?", "prompt"
            )
    return turns


def _wrong_turn(chat: Sequence[Any]) -> InvalidRequest:
    """Return the error for the first turn that is no {role, content} map."""
    for index, turn in enumerate(chat):
        try:
            msgspec.convert(turn, ChatMessage)
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "").replace(" - at $.", ", at ")
            reason = reason[0].lower() + reason[1:]
            return InvalidRequest(
                f"prompt is no chat: turn {index} is {shown(turn)}: {reason}", "prompt"
            )
    raise AssertionError("msgspec refused the chat, but accepts each of its turns")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def check_integers(message: Any, field: str = "") -> None:
    """Raise InvalidRequest for an integer of a message that has more than 64 bits, with its field.

    JSON of the client, such as the schemas of tools, may have any integers.

    Args:
        message: a struct, or a value within one.
        field: name of the field that holds the value.
    """
    if isinstance(message, msgspec.Struct):
        for name in message.__struct_fields__:
            if name not in JSON_FIELDS:
                check_integers(getattr(message, name), name)
    elif isinstance(message, dict):
        for key, value in message.items():
            check_integers(key, field)
            check_integers(value, field)
    elif isinstance(message, list | tuple):
        for value in message:
            check_integers(value, field)
    elif isinstance(message, int) and not -(2**63) <= message < 2**64:
        raise InvalidRequest(
            f"{field} holds {shown_number(message)}: integers of a request are from {-(2**63)} to"
            f" {2**64 - 1}",
            field,
        )


Chat = list[dict[str, str]]
# A text, its token ids, or a chat of {role, content} maps.
Prompt = str | list[int] | Chat

NO_CHAT_OPTIONS = ChatOptions()
# Characters of a text that the repr of a Completion shows.
MAX_REPR_CHARS = 72


class RequestOptions(TypedDict, total=False):
    """Keywords of submit, generate and stream, beside prompt and params.

    Attributes:
        timeout: seconds within which the request must end, at most one week; then client or server
            aborts it, and DeadlineExceeded is raised. None: the server's --request-timeout.
        queue_timeout: seconds within which the server must admit it, with the same range and
            error. None: the server's --queue-timeout.
        priority: -1000 to 1000, the largest first, if the server schedules by priority.
        truncate_prompt: keep the last tokens of a prompt that is longer than the context; None:
            the server's --allow-auto-truncate.
        chat: tools and variables for the chat template.
        clamp_max_new_tokens: if the context leaves less than max_new_tokens, generate that number
            instead of raising PromptTooLong.
        traceparent: the caller's span, as in W3C Trace Context: the server's spans are below it.
        cache_salt: cached prefixes are shared only with requests of the same salt.
        adapter: name of the LoRA adapter that answers.
        cache: keep what the request computes in the prefix cache for some seconds after its end,
            for the next turn of a conversation (CacheHint); see release_cache.
        receipt: completions have a receipt, for which the server is asked two more questions; not
            with submit.
    """

    timeout: float | None
    queue_timeout: float | None
    priority: int
    truncate_prompt: bool | None
    chat: ChatOptions
    clamp_max_new_tokens: bool
    traceparent: str
    cache_salt: str
    adapter: str
    cache: CacheHint | None
    receipt: bool


class KeptRequest(NamedTuple):
    """A request that outlives its client.

    Attributes:
        request_id: unique among all clients of this identity.
        keep_s: seconds for which the server goes on with it while no client is connected.
        is_resent: a client before this one may have sent it: what it has so far comes again.
    """

    request_id: str
    keep_s: float
    is_resent: bool = False


def is_time_limit(timeout: float | None) -> TypeGuard[float]:
    """Return whether a client enforces this timeout. The server refuses one out of its range."""
    return timeout is not None and 0 < timeout < math.inf


@dataclass(slots=True)
class Timings:
    """Unix time at which the request reached each stage; 0.0 for a stage that it did not reach.

    `submitted` and `delivered` are read from the client's clock, the others from the server's,
    shifted if the two disagree (see `reconcile`). `ttft`, `queue`, `tpot` and `total` are seconds.

    Attributes:
        submitted: the client sent it.
        received: the server read it.
        tokenized: the prompt was encoded.
        admitted: it left the waiting queue.
        first_token: the first token was sampled.
        detokenized: the last text was made.
        delivered: the client received the end.
        token_times: end of the step that sampled each token; those of `first_token_ids` have none.
    """

    submitted: float
    received: float = 0.0
    tokenized: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    detokenized: float = 0.0
    delivered: float = 0.0
    token_times: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Seconds from submission to the end of the text, at the client."""
        return self.delivered - self.submitted

    @property
    def queue(self) -> float | None:
        """Seconds from the end of tokenization to admission; None if it was never admitted."""
        return max(0.0, self.admitted - self.tokenized) if self.admitted else None

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token; None without a token."""
        return self.first_token - self.submitted if self.first_token else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None with fewer than two tokens."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def reconcile(self) -> None:
        """Shift the server's times to lie between `submitted` and `delivered`.

        They lie outside if the server runs on another machine, or if a wall clock was set after
        one of the programs had started. All times are shifted by the same amount, to the middle.
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


class ForkSource(NamedTuple):
    """An answer, or what has arrived of one, that other answers go on from.

    Attributes:
        request: the message that it answers.
        token_ids: its tokens; while it is streamed, those that have arrived.
        matched_stop: the stop string or stop token that has ended it.
    """

    request: Generate
    token_ids: list[int]
    matched_stop: str | int | None = None


@dataclass(slots=True, repr=False)
class Completion:
    """A finished request.

    Attributes:
        finish_reason: stop, length or abort.
        matched_stop: stop string or stop token id that ended the text.
        index: index of the choice.
        logprobs: logprobs of `token_ids`; None unless requested.
        prompt_logprobs: logprobs of all prompt tokens; None unless requested.
        others: the other choices in order, if this is choice 0 of `n`.
        receipt: what the answer is a function of; None unless requested.
        vector: the answer to a request for one; then there are no text and no tokens.
        adapter: id of the adapter that has answered, a hash of its content; "": none has.
        source: what `fork` goes on from.
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
    receipt: Receipt | None = None
    vector: "array[float] | None" = None
    adapter: str = ""
    source: ForkSource | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Return the start of the text and the main numbers."""
        ttft = self.timings.ttft
        text = self.text[:MAX_REPR_CHARS] + "…" * (len(self.text) > MAX_REPR_CHARS)
        parts = [repr(text), self.finish_reason, f"{len(self.token_ids)} tokens"]
        parts += [f"ttft {ttft:.3f} s"] if ttft is not None else []
        parts += [f"total {self.timings.total:.3f} s"]
        parts += [f"choice 0 of {len(self.others) + 1}"] if self.others else []
        return f"Completion({', '.join(parts)})"


@dataclass(slots=True)
class StreamChunk:
    """New text and tokens of a request.

    Attributes:
        token_times: Unix time of each token on the server's clock; 0.0 of one that was given
            (`first_token_ids`).
        received_at: Unix time on the client's clock.
        completion: the whole completion, in the last chunk of a choice only.
        index: index of the choice.
        logprobs: logprobs of `token_ids`; None unless requested.
        prompt_logprobs: logprobs of all prompt tokens, in the first chunk of choice 0; None unless
            requested.
        text_lengths: number of characters of `text` that each of `token_ids` adds; None unless
            requested, and for a single token without an end.
        source: what `fork` goes on from.
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
    text_lengths: list[int] | None = None
    source: ForkSource | None = field(default=None, compare=False, repr=False)


def is_list_of_prompts(prompt: Any) -> bool:
    """Return whether a value is a list of prompts; an empty list is."""
    return isinstance(prompt, list | tuple) and (
        not prompt or isinstance(prompt[0], str | list | tuple)
    )


def check_is_one_prompt(prompt: Any, call: str) -> None:
    """Raise InvalidRequest for a list of prompts given to a method that takes one prompt."""
    if is_list_of_prompts(prompt):
        raise InvalidRequest(
            f"prompt is a list of {len(prompt)} prompts: {call} takes one prompt, call it for each",
            "prompt",
        )


@dataclass(slots=True)
class TextEmbedding:
    """The vector of a text.

    Attributes:
        vector: its numbers, which numpy.asarray takes without a copy.
        num_tokens: number of tokens of the text.
    """

    vector: "array[float]"
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TextScore:
    """The score of a pair of texts.

    Attributes:
        score: a probability, if the model does not say otherwise.
        num_tokens: number of tokens of the pair.
    """

    score: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RankedText:
    """A document, and how well it matches a query.

    Attributes:
        index: its number in the list.
        score: as in TextScore.
        text: the document.
    """

    index: int
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class TextLabels:
    """The labels of a text.

    Attributes:
        label: the likeliest one.
        probs: the probability of each label, in the model's order.
        num_tokens: number of tokens of the text.
    """

    label: str
    probs: dict[str, float]
    num_tokens: int


def pairs_of(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of two texts or lists; a single first text goes with every second one.

    Raises:
        InvalidRequest: the lists do not have the same length.
    """
    firsts = [text_1] if isinstance(text_1, str) else list(text_1)
    seconds = [text_2] if isinstance(text_2, str) else list(text_2)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"text_1 has {len(firsts)} texts, and text_2 has {len(seconds)}: give one first text,"
            " or as many as there are second ones",
            "text_1",
        )
    return list(zip(firsts, seconds, strict=True))


class RenderedPrompt(NamedTuple):
    """A prompt as the model reads it: its text, a chat as the template writes it, and its ids."""

    text: str
    token_ids: list[int]


class WirePrompt(NamedTuple):
    """A prompt in the form of the Generate message: text or chat, or packed token ids."""

    prompt: str | list[ChatMessage]
    token_ids: bytes | None = None


def wire_prompt(prompt: Any) -> WirePrompt:
    """Convert a prompt for the wire. Raise InvalidRequest for a type or value that is no prompt."""
    if isinstance(prompt, str):
        return WirePrompt(prompt)
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
        return WirePrompt(checked_chat(prompt))
    if isinstance(prompt, list | tuple):
        try:
            return WirePrompt("", pack_ids(prompt))
        except OverflowError:
            wrong = next(i for i in prompt if not -(2**31) <= i < 2**31)
            raise InvalidRequest(
                f"prompt_token_ids holds {shown_number(wrong)}: token ids are 0 to {2**31 - 1}",
                "prompt_token_ids",
            ) from None
        except TypeError as error:
            raise InvalidRequest(f"prompt is no list of token ids: {error}", "prompt") from None
    raise InvalidRequest(
        f"prompt is {shown(prompt)}: it must be a string, a list of token ids, or a list of"
        " {role, content} maps",
        "prompt",
    )
