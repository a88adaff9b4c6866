"""Turn a client's message into what the scheduler, or the client itself, is sent.

`Encoder` turns texts and chats into token ids, `Preparer` does the rest.
"""

import hashlib
import logging
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quadriga.errors import ConfigError, InvalidRequest, QuadrigaError
from quadriga.sampling.params import (
    NEUTRAL,
    Grammar,
    SamplingDefaults,
    SamplingParams,
    given,
    grammar_of,
    without_grammar,
)
from quadriga.sampling.pooling import (
    CLASSIFY,
    PROBABILITIES,
    Pooling,
    check_scoring,
    filled_pooling,
)
from quadriga.sampling.validation import UnservedTokens, validate_params
from quadriga.server.answer_format import ends_inside
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.grammars.stop_regex import compile_stop_regex
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.client import (
    ChatMessage,
    ChatOptions,
    Detokenize,
    Generate,
    Refused,
    Text,
    Tokenize,
    Tokens,
    check_chat,
    check_chat_options,
)
from quadriga.wire.grammar import ThinkingForm
from quadriga.wire.packing import pack_ids, with_large_integers
from quadriga.wire.sockets import encode
from tokenizer_proc.preparation import validation
from tokenizer_proc.preparation.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def thinking_form(
    params: SamplingParams, prompt_end: str, has_grammar: bool
) -> ThinkingForm | None:
    """Return the reasoning that is limited, or that precedes the grammar.

    The prompt ends within the reasoning if the last of the marks in its end begins it. It has the
    whole reasoning if it ends with the mark that ends it. Otherwise the answer may begin with it.

    Args:
        params: the parameters, checked.
        prompt_end: the last characters of the prompt's text.
        has_grammar: a grammar applies to the answer.

    Returns:
        None if the reasoning is not marked, or over, or nothing depends on it.
    """
    start, end = params.thinking_start.strip(), params.thinking_end.strip()
    if not end or (params.thinking_token_budget is None and not has_grammar):
        return None
    is_inside = not start or ends_inside(prompt_end, start, end)
    if not is_inside and prompt_end.rstrip().endswith(end):
        return None
    return ThinkingForm(params.thinking_end, start, is_inside, params.thinking_token_budget)


def without_thinking(params: SamplingParams) -> SamplingParams:
    """Return a copy without the parameters of the reasoning."""
    return msgspec.structs.replace(
        params, thinking_token_budget=None, thinking_start="", thinking_end=""
    )


# The tokenizers library takes about 200 bytes of memory for a byte of text (150 to 195 with
# byte-level BPE), so that the longest text takes 1.6 GiB.
MAX_TEXT_BYTES = 8 * 1024 * 1024
MAX_BAD_WORD_TOKENS = 32


def _ids_around(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and behind every text, such as that of <bos>."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    starts = range(len(full) - len(plain) + 1)
    found = [start for start in starts if full[start : start + len(plain)] == plain]
    return (full[: found[0]], full[found[0] + len(plain) :]) if found else ([], [])


class PairForm(NamedTuple):
    """What a tokenizer writes around the two texts of a pair.

    Attributes:
        leading, between, trailing: ids before the first text, between both, and behind the second.
        num_first_between: number of `between` that are of the first type; None: all tokens of a
            pair are.
    """

    leading: list[int]
    between: list[int]
    trailing: list[int]
    num_first_between: int | None

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> "PairForm | None":
        """Return the form of a tokenizer's pairs; None if it has none."""
        first, second = (tokenizer.encode(text, add_special_tokens=False).ids for text in "ab")
        encoded = tokenizer.encode("a", "b")
        ids, types = encoded.ids, encoded.type_ids
        begin = _find(ids, first, 0)
        middle = None if begin is None else _find(ids, second, begin + len(first))
        if begin is None or middle is None:
            return None
        end = begin + len(first)
        is_typed = types[middle] == 1
        num_first = types[end:middle].count(0) if is_typed else None
        return cls(ids[:begin], ids[end:middle], ids[middle + len(second) :], num_first)

    @property
    def num_added(self) -> int:
        """Number of ids beside those of the two texts."""
        return len(self.leading) + len(self.between) + len(self.trailing)


def _find(ids: list[int], part: list[int], begin: int) -> int | None:
    """Return where a part of ids is, from `begin` on; None if it is not there."""
    places = range(begin, len(ids) - len(part) + 1)
    return next((place for place in places if ids[place : place + len(part)] == part), None)


def fitted_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths of two texts that are cut to `room` tokens together, the longest first.

    As in tokenizers, `TruncationStrategy.LongestFirst`.
    """
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)


class Encoder:
    """Encode texts, pairs and chats, and decode token ids."""

    def __init__(self, tokenizer: "Tokenizer", chat: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._leading_ids, self._trailing_ids = _ids_around(tokenizer)
        self._pair_form = PairForm.of(tokenizer)

    def render(self, prompt: str | list[ChatMessage], chat: ChatOptions) -> str:
        """Return a text as it is, or a chat as the model's template writes it.

        Raises:
            InvalidRequest: the template refuses the chat.
        """
        return prompt if isinstance(prompt, str) else self._chat.render(prompt, chat)

    def encode(self, text: str, is_chat: bool) -> "array[int]":
        """Return the token ids of a text, or of a rendered chat.

        A text that is not empty begins with the tokenizer's beginning-of-text token, if it has one
        that it adds to texts; templates write it themselves.

        Raises:
            InvalidRequest: the text is over MAX_TEXT_BYTES.
        """
        ids = self._ids_of(text)
        leading = self._leading_ids if ids and not is_chat else []
        return array("i", ids if ids[: len(leading)] == leading else leading + ids)

    def encode_whole(self, text: str, limit: int | None) -> "array[int]":
        """Return the ids of a text between those that the tokenizer puts around texts.

        Args:
            text: the text.
            limit: number of ids, to which the end of the text is cut; None: it is not cut.

        Raises:
            InvalidRequest: the text is over MAX_TEXT_BYTES.
        """
        ids, leading, trailing = self._ids_of(text), self._leading_ids, self._trailing_ids
        if limit is not None:
            ids = ids[: max(limit - len(leading) - len(trailing), 0)]
        return array("i", leading + ids + trailing)

    def encode_pair(
        self, first: str, second: str, most_second: int | None, limit: int | None
    ) -> "tuple[array[int], int]":
        """Return the ids of a pair of texts as the tokenizer writes it.

        Args:
            first: the first text.
            second: the second text.
            most_second: number of ids of the second text, to which its end is cut; None: all.
            limit: number of ids, to which the ends of both texts are cut; None: they are not cut.

        Returns:
            The ids, and the number of ids of the first type; 0: all are.

        Raises:
            InvalidRequest: a text is over MAX_TEXT_BYTES, or the tokenizer writes no pairs.
        """
        form = self._pair_form
        if form is None:
            raise InvalidRequest(
                "the model's tokenizer.json has no form of a pair of texts: serve a model that"
                " ranks, or send one text",
                "text_pair",
            )
        one, other = self._ids_of(first), self._ids_of(second)[:most_second]
        if limit is not None:
            room = max(limit - form.num_added, 0)
            num_one, num_other = fitted_lengths(len(one), len(other), room)
            one, other = one[:num_one], other[:num_other]
        num_first = form.num_first_between
        if num_first is not None:
            num_first += len(form.leading) + len(one)
        ids = form.leading + one + form.between + other + form.trailing
        return array("i", ids), num_first or 0

    def _ids_of(self, text: str) -> list[int]:
        """Return the ids of a text alone. Raise InvalidRequest if it is over MAX_TEXT_BYTES."""
        num_bytes = len(text.encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"the prompt's text is {num_bytes} bytes: at most {MAX_TEXT_BYTES} are encoded;"
                " shorten it, or send token ids",
                "prompt",
            )
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: "array[int]", skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens))

    def bad_words(self, words: list[str]) -> list[list[int]]:
        """Return the token ids of each spelling of each word.

        A word is spelled with a space before it, and without one, as within another word.

        Raises:
            InvalidRequest: a word has more than MAX_BAD_WORD_TOKENS tokens.
        """
        spellings = [text for word in words for text in (word, " " + word.lstrip(" "))]
        encodings = self._tokenizer.encode_batch_fast(spellings, add_special_tokens=False)
        distinct_ids = {tuple(encoding.ids): None for encoding in encodings if encoding.ids}
        max_length = max(map(len, distinct_ids), default=0)
        if max_length > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words has a word of {max_length} tokens: at most {MAX_BAD_WORD_TOKENS} are"
                " allowed; shorten it",
                "bad_words",
            )
        return [list(ids) for ids in distinct_ids]


# Turn a client's message into what the scheduler, or the client itself, is sent.
#
# All of it costs time and memory in proportion to the message. Short messages are prepared on the
# event loop, long ones by the processes of `pool.py`.

# A message of this size is parsed, rendered and encoded in 1 to 2 ms.
MAX_INLINE_BYTES = 4096
# The end of a chat's prompt says whether the answer begins in the reasoning.
NUM_PROMPT_END_CHARS = 256
DIGEST_BYTES = 16


class Prepared(msgspec.Struct, tag="prepared", array_like=True, frozen=True):
    """A Generate that is ready for the scheduler.

    Attributes:
        request: the message with its prompt as `prompt_token_ids`, cut to the context where the
            client allows that, and with complete parameters and timeouts.
        bad_words: token ids (int32 bytes) of each spelling of each of them.
        grammar: taken out of the parameters; not checked yet.
        prompt_end: the last NUM_PROMPT_END_CHARS characters of the rendered chat; "" for other
            prompts.
        thinking: the reasoning that is limited, or that precedes the grammar.
        digest: hash of what the client has asked for, the same where it asks for it again.
    """

    request: Generate
    bad_words: list[bytes]
    grammar: Grammar | None
    prompt_end: str = ""
    thinking: ThinkingForm | None = None
    digest: bytes = b""


Answer = Tokens | Text
# All but Prepared are public messages, which the client is sent as they stand.
Outcome = Prepared | Tokens | Text | Refused

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def decode_outcome(data: bytes) -> Outcome:
    """Return the outcome that `Preparer.prepare_frame` has encoded."""
    outcome: Outcome = _decode_outcome(data)
    return outcome


class Preparer:
    """Check, render, encode and fit messages. It has no state, so that forks may share it.

    Args:
        args: the flags.
        model: the model's files.
        encoder: encodes texts and chats.
        unserved: the tokenizer's tokens that the model does not have; None: there are none.
    """

    def __init__(
        self,
        args: FrontendArgs,
        model: ModelFiles,
        encoder: Encoder,
        unserved: UnservedTokens | None = None,
    ) -> None:
        self._args = args
        self._model = model
        self._encoder = encoder
        self._unserved = unserved or UnservedTokens(model.vocab_size)
        self._defaults = sampling_defaults(args.sampling_defaults, model.generation_config)

    def prepare_frame(self, frame: bytes) -> bytes:
        """Return the encoded Outcome of a Generate, Tokenize or Detokenize. Never raise."""
        try:
            message = validation.parse(frame)
            if isinstance(message, Generate):
                return encode(self.prepare(message))
            assert isinstance(message, Tokenize | Detokenize)
            return encode(self.convert(message))
        except QuadrigaError as error:
            return encode(Refused.of(validation.peek(frame).request_id, error))

    def prepare(self, message: Generate) -> Prepared:
        """Return a request with its prompt's token ids, complete parameters and timeouts.

        Raises:
            InvalidRequest: a value is out of its range, or the prompt cannot be encoded.
            PromptTooLong: prompt and max_new_tokens do not fit the context and may not be cut.
        """
        model, params, args = self._model, message.params, self._args
        validation.check_urgency(message)
        if params.pooling is not None:
            return self._prepare_pooled(message, params.pooling)
        validation.check_served_tokens(model)
        validate_params(params, model.vocab_size, self._unserved.texts)
        for pattern in params.stop_regexes:
            compile_stop_regex(pattern)
        grammar = grammar_of(params)
        if grammar is not None:
            validation.check_can_end(params, model)
            validation.check_grammar_tokens(grammar, self._unserved)
            params = without_grammar(params)
        prompt = self._encode_prompt(message)
        thinking = None
        if params.thinking_end:
            self._unserved.check_text("thinking_start", params.thinking_start)
            self._unserved.check_text("thinking_end", params.thinking_end)
            thinking = thinking_form(params, self._text_end(prompt), grammar is not None)
            params = without_thinking(params)
        if params.logprob_token_ids and params.logprobs is None:
            params = msgspec.structs.replace(params, logprobs=0)
        begins_anew = _is_new_turn(message) and (thinking is not None or _may_be_text(grammar))
        if params.continues_prompt is None and not begins_anew:
            params = msgspec.structs.replace(params, continues_prompt=True)
        ids, params = validation.fit(
            prompt.ids,
            params.filled(self._defaults),
            model,
            args.default_max_tokens,
            given(message.truncate_prompt, args.allow_auto_truncate),
            message.clamp_max_new_tokens,
        )
        bad_words = self._bad_words(params.bad_words) if params.bad_words else []
        request = self._ready(message, ids, params)
        return Prepared(request, bad_words, grammar, prompt.end, thinking, _digest(message))

    def _prepare_pooled(self, message: Generate, asked: Pooling) -> Prepared:
        """Return a request for a vector, which one token stands for in what follows.

        Raises:
            InvalidRequest: a value is out of its range, or the prompt cannot be encoded.
            PromptTooLong: the prompt does not fit the context and may not be cut.
        """
        model, args = self._model, self._args
        validation.check_served_vector(asked, model)
        pooling = self._filled(asked)
        validation.check_vector_params(message)
        may_cut = given(message.truncate_prompt, args.allow_auto_truncate)
        text, limit = message.prompt, model.context_length
        if may_cut and pooling.max_tokens is not None:
            limit = min(limit, pooling.max_tokens)
        room = limit if may_cut else None
        if (second := pooling.text_pair) is not None:
            first = validation.checked_first(message)
            num_first = 0

            def encode() -> _Prompt:
                nonlocal num_first
                most = pooling.max_pair_tokens
                ids, num_first = self._encoder.encode_pair(first, second, most, room)
                return _Prompt(ids)

            ids = self._guarded(encode).ids
            pooling = msgspec.structs.replace(pooling, text_pair=None, num_first=num_first)
        elif isinstance(text, str) and message.prompt_token_ids is None:
            ids = self._guarded(lambda: _Prompt(self._encoder.encode_whole(text, room))).ids
        else:
            ids = self._encode_prompt(message).ids
            ids = ids[:limit] if may_cut else ids
        validation.check_fits_whole(ids, limit, pooling.num_last)
        params = SamplingParams(max_new_tokens=1, seed=0, pooling=pooling)
        request = self._ready(message, ids, params)
        return Prepared(request, [], None, digest=_digest(message))

    def _filled(self, asked: Pooling) -> Pooling:
        """Return what vector is asked for with all that the model says. Raise InvalidRequest."""
        model, args = self._model, self._args
        if asked.method == CLASSIFY:
            scores = model.scores
            assert scores is not None
            activation = asked.activation or scores.activation
            if activation == PROBABILITIES:
                activation = scores.probabilities
            check_scoring(asked)
            return msgspec.structs.replace(asked, activation=activation, num_first=0, whole=True)
        method = args.pooling or model.pooling
        pooling = filled_pooling(asked, method, model.hidden_size, model.vocab_size)
        return msgspec.structs.replace(pooling, num_first=0, whole=model.is_encoder)

    def _ready(self, message: Generate, ids: "array[int]", params: SamplingParams) -> Generate:
        """Return a message with its prompt as ids, complete parameters and timeouts."""
        args = self._args
        return msgspec.structs.replace(
            message,
            prompt="",
            prompt_token_ids=pack_ids(ids),
            params=params,
            chat=ChatOptions(),
            queue_timeout=given(message.queue_timeout, args.queue_timeout),
            timeout=given(message.timeout, args.request_timeout),
        )

    def convert(self, message: Tokenize | Detokenize) -> Answer:
        """Return the ids of a text, or the text of ids. Raise InvalidRequest."""
        request_id = message.request_id
        validation.check_request_id(request_id)
        if isinstance(message, Tokenize):
            prompt = self._encode(message.prompt, message.chat)
            text = prompt.text if message.with_text else ""
            return Tokens(request_id, pack_ids(prompt.ids), text)
        ids = validation.check_ids(message.token_ids, "token_ids", self._unserved)
        return Text(request_id, self._encoder.decode(ids, message.skip_special_tokens))

    def _encode_prompt(self, message: Generate) -> "_Prompt":
        if message.prompt_token_ids is not None:
            return _Prompt(validation.check_prompt_ids(message, self._unserved))
        return self._encode(message.prompt, message.chat)

    def _bad_words(self, words: list[str]) -> list[bytes]:
        """Return the token ids of each spelling of each word. Raise InvalidRequest."""
        spellings = self._encoder.bad_words(words)
        for ids in spellings:
            self._unserved.check_ids("bad_words", ids)
        return [pack_ids(ids) for ids in spellings]

    def _text_end(self, prompt: "_Prompt") -> str:
        """Return the end of a prompt's text, that of token ids decoded."""
        if prompt.text or not prompt.ids:
            return prompt.text[-NUM_PROMPT_END_CHARS:]
        return self._encoder.decode(prompt.ids[-NUM_PROMPT_END_CHARS:], False)

    def _encode(self, prompt: str | list[ChatMessage], chat: ChatOptions) -> "_Prompt":
        is_chat = not isinstance(prompt, str)

        def encode() -> "_Prompt":
            if not isinstance(prompt, str):
                check_chat(prompt)
                check_chat_options(chat)
            text = self._encoder.render(prompt, chat)
            return _Prompt(self._encoder.encode(text, is_chat), text, is_chat)

        return self._guarded(encode)

    def _guarded(self, encode: "Callable[[], _Prompt]") -> "_Prompt":
        """Return a prompt that a function encodes. Raise InvalidRequest for whatever it raises."""
        try:
            prompt = encode()
            if self._unserved.texts:
                self._unserved.check_ids("prompt", prompt.ids)
            return prompt
        except QuadrigaError:
            raise
        except Exception as error:  # a template or a tokenizer may raise anything
            logging.exception("a prompt cannot be encoded")
            raise InvalidRequest(f"prompt cannot be encoded: {error}", "prompt") from None


def _digest(message: Generate) -> bytes:
    """Return the hash of what a client asks for."""
    asked = (message.prompt, message.prompt_token_ids, message.params, message.chat)
    return hashlib.blake2b(_packed(asked), digest_size=DIGEST_BYTES).digest()


def _packed(asked: object) -> bytes:
    try:
        return encode(asked)
    except OverflowError:
        return encode(with_large_integers(asked))


class _Prompt(NamedTuple):
    """The token ids of a prompt and the text that they were made of, "" if they came as ids."""

    ids: "array[int]"
    text: str = ""
    is_chat: bool = False

    @property
    def end(self) -> str:
        """The last characters of a rendered chat; "" for other prompts."""
        return self.text[-NUM_PROMPT_END_CHARS:] if self.is_chat else ""


def _is_new_turn(message: Generate) -> bool:
    """Return whether the answer begins a turn of a chat, and continues no text."""
    return not isinstance(message.prompt, str) and message.chat.add_generation_prompt


def _may_be_text(grammar: Grammar | None) -> bool:
    """Return whether an answer may begin with free text; else the grammar says its first space."""
    return grammar is None or grammar.kind == "structural_tag"


def sampling_defaults(source: str, generation_config: dict[str, Any]) -> SamplingDefaults:
    """Return the sampling parameters of requests that leave them open.

    `source` is --sampling-defaults. Raise ConfigError for a generation_config that cannot be used.
    """
    if source == "openai":
        return NEUTRAL
    fields = {
        name: generation_config[name]
        for name in SamplingDefaults.__struct_fields__
        if generation_config.get(name) is not None
    }
    try:
        defaults = msgspec.convert(fields, SamplingDefaults)
        validate_params(SamplingParams().filled(defaults), vocab_size=1)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(
            f"the model's generation_config.json cannot be used: {error};"
            " start with --sampling-defaults openai"
        ) from None
    return defaults
