"""Turn a client's message into what the scheduler, or the client itself, is sent.

encode.py turns texts and chats into token ids, `Preparer` does the rest.
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
    LOGPROBS,
    POOLINGS,
    PROBABILITIES,
    SCORINGS,
    Pooling,
    check_scoring,
    filled_pooling,
)
from quadriga.sampling.validation import UnservedTokens, validate_params
from quadriga.server.answer_format import ends_inside
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.grammars.stop_regex import compile_stop_regex
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.cache import CacheHint
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
from tokenizer_proc.preparation.encode import Encoder

if TYPE_CHECKING:
    pass

from quadriga.errors import ModelError
from quadriga.server.models.families.classifier import LogitScore

# Prompts of models that make text and score a pair of texts, such as Qwen3-Reranker.

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt of Qwen3-Reranker (Zhang et al. 2025, https://arxiv.org/abs/2506.05176), for files
# whose chat template has no roles for the texts of a pair.
OWN_FORM_OF = "qwen3"
_BEFORE = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_PROBES = "first text", "second text"


class PairPrompts:
    """Writes the prompt of a pair, with the model's chat template if that takes pairs.

    Such a template has the roles "query" and "document", and the instruction as "system".

    Args:
        encoder: encodes texts, and renders chats.
        score: how the model scores.
        model_type: of its config.json.

    Attributes:
        token_ids: of the token that says that a pair matches, and of the other one, if any.

    Raises:
        ModelError: there is no form of a pair, or a text that should be one token is none.
    """

    def __init__(self, encoder: Encoder, score: LogitScore, model_type: str) -> None:
        self._encoder = encoder
        self._instruction = score.instruction
        has_own_form = model_type == OWN_FORM_OF
        # Files that name the ids are those whose template was written for pairs.
        is_for_pairs = isinstance(score.true, int) or not has_own_form
        self._has_template = is_for_pairs and self._takes_pairs()
        if not self._has_template and not has_own_form:
            raise ModelError(
                f"the model ({model_type}) scores pairs of texts, and its chat template shows no"
                " messages of the roles query and document: give one with --chat-template"
            )
        self._after = self._render(*_PROBES, "").rpartition(_PROBES[1])[2]
        named = (score.true,) if score.false is None else (score.true, score.false)
        self.token_ids = [self._id_of(token) for token in named]

    def encode(self, first: str, second: str, pooling: Pooling, limit: int | None) -> "array[int]":
        """Return the ids of a pair's prompt.

        Args:
            first: the first text, such as a query.
            second: the second one, such as a document.
            pooling: the instruction, and the tokens to which each text is cut.
            limit: number of ids, to which the end of the second text is cut, as far as that
                suffices; None: it is not cut.

        Raises:
            InvalidRequest: a text cannot be encoded.
        """
        first = self._cut(first, pooling.max_first_tokens)
        second = self._cut(second, pooling.max_second_tokens)
        text = self._render(first, second, pooling.instruction or self._instruction)
        ids = self._encoder.encode(text, is_chat=True)
        if limit is None or len(ids) <= limit or not text.endswith(self._after):
            return ids
        before = self._encoder.encode(text.removesuffix(self._after), is_chat=True)
        after = self._encoder.encode(self._after, is_chat=True)
        room, length = limit - len(after), len(self._encoder.encode(second, is_chat=True))
        return before[:room] + after if len(before) - length <= room else ids

    def _render(self, first: str, second: str, instruction: str) -> str:
        if self._has_template:
            return self._encoder.render(_messages(first, second, instruction), ChatOptions())
        task = instruction or DEFAULT_INSTRUCTION
        return f"{_BEFORE}<Instruct>: {task}\n<Query>: {first}\n<Document>: {second}{_AFTER}"

    def _takes_pairs(self) -> bool:
        try:
            text = self._encoder.render(_messages(*_PROBES, ""), ChatOptions())
        except InvalidRequest:
            return False
        return all(probe in text for probe in _PROBES)

    def _cut(self, text: str, most: int | None) -> str:
        if most is None:
            return text
        ids = self._encoder.encode(text, is_chat=True)
        return text if len(ids) <= most else self._encoder.decode(ids[:most], False)

    def _id_of(self, token: int | str) -> int:
        if isinstance(token, int):
            return token
        ids = self._encoder.encode(token, is_chat=True)
        if len(ids) != 1:
            raise ModelError(
                f"the model should score by the token {token!r}, which is {len(ids)} tokens of its"
                " tokenizer"
            )
        return ids[0]


def _messages(first: str, second: str, instruction: str) -> list[ChatMessage]:
    system = [ChatMessage("system", instruction)] if instruction else []
    return [*system, ChatMessage("query", first), ChatMessage("document", second)]


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
        score, kind = model.scores and model.scores.logit_score, str(model.config.get("model_type"))
        self._pair_prompts = PairPrompts(encoder, score, kind) if score else None
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
        if request.cache is not None:
            # The tokens before the mark of a prompt that is cut are not those of other prompts.
            is_cut = len(ids) < len(prompt.ids)
            hint = request.cache if is_cut else self._counted(request.cache, message, prompt)
            hint = msgspec.structs.replace(hint, num_messages=0, num_chars=None)
            request = msgspec.structs.replace(request, cache=hint)
        return Prepared(request, bad_words, grammar, prompt.end, thinking, _digest(message))

    def _counted(self, hint: CacheHint, message: Generate, prompt: "_Prompt") -> CacheHint:
        """Return a hint with the number of tokens up to the message that it names.

        0 where it names the end of the chat, or the template does not write the message.
        """
        num_tokens, chat = hint.num_tokens, message.prompt
        if hint.num_messages and not isinstance(chat, str) and message.prompt_token_ids is None:
            text = text_before(self._encoder, chat, message.chat, hint, prompt.text)
            ids = self._encoder.encode(text, is_chat=True) if text else array("i")
            num_tokens = _num_common(ids, prompt.ids)
        num_tokens = num_tokens if num_tokens < len(prompt.ids) else 0
        return msgspec.structs.replace(hint, num_tokens=num_tokens)

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
        # The probabilities of tokens are asked for at the end of a prompt, which is never cut.
        may_cut = pooling.method != LOGPROBS and given(
            message.truncate_prompt, args.allow_auto_truncate
        )
        text, limit = message.prompt, model.context_length
        if may_cut and pooling.max_tokens is not None:
            limit = min(limit, pooling.max_tokens)
        room, num_first = limit if may_cut else None, 0
        if (second := pooling.text_pair) is not None:
            first = validation.checked_first(message)

            def encode() -> _Prompt:
                nonlocal num_first
                if self._pair_prompts is not None:
                    return _Prompt(self._pair_prompts.encode(first, second, pooling, room))
                ids, num_first = self._encoder.encode_pair(first, second, pooling, room)
                return _Prompt(ids)

            ids = self._guarded(encode).ids
        elif isinstance(text, str) and message.prompt_token_ids is None:
            text = (
                model.prompt_before(pooling.prompt_name) + text
                if pooling.method in POOLINGS
                else text
            )
            ids = self._guarded(lambda: _Prompt(self._encoder.encode_whole(text, room))).ids
        else:
            ids = self._encode_prompt(message).ids
            ids = ids[:limit] if may_cut else ids
        validation.check_fits_whole(ids, limit, pooling)
        if pooling.text_pair is not None:
            pooling = msgspec.structs.replace(
                pooling, text_pair=None, instruction="", num_first=num_first
            )
        params = SamplingParams(max_new_tokens=1, seed=0, pooling=pooling)
        request = self._ready(message, ids, params)
        return Prepared(request, [], None, digest=_digest(message))

    def _filled(self, asked: Pooling) -> Pooling:
        """Return what vector is asked for with all that the model says. Raise InvalidRequest."""
        model, args = self._model, self._args
        if asked.method in SCORINGS:
            scores = model.scores
            assert scores is not None
            check_scoring(asked)
            activation = asked.activation or scores.activation
            if activation == PROBABILITIES:
                activation = scores.probabilities
            return msgspec.structs.replace(
                asked,
                method=CLASSIFY,
                activation=activation,
                token_ids=self._pair_prompts.token_ids if self._pair_prompts else [],
                num_last=0,
                num_first=0,
                whole=model.is_encoder,
            )
        method = args.pooling or model.pooling
        pooling = filled_pooling(asked, method, model.vector_size, model.vocab_size)
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
        if is_chat and not self._encoder.takes_chats:
            validation.check_served_tokens(self._model)  # an encoder needs no template

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


# Stands where a message ends up to which a prompt is kept, while the chat is rendered again.
_KEPT_HERE = "f3a9c1d27b604e58"


def text_before(
    encoder: Encoder, chat: list[ChatMessage], options: ChatOptions, hint: CacheHint, text: str
) -> str:
    """Return the text of a chat's prompt up to the message that a hint names.

    Args:
        encoder: renders chats.
        chat: the messages.
        options: its tools and variables.
        hint: names a message.
        text: of the whole prompt.

    Returns:
        "" for the end of the chat, and for a message that the template does not write as it is.
    """
    place = min(hint.num_messages, len(chat)) - 1
    content = chat[place].content
    num_chars = len(content) if hint.num_chars is None else min(hint.num_chars, len(content))
    if place == len(chat) - 1 and num_chars == len(content):
        return ""
    content = content[:num_chars] + _KEPT_HERE + content[num_chars:]
    marked = list(chat)
    marked[place] = msgspec.structs.replace(chat[place], content=content)
    before, mark, _ = encoder.render(marked, options).partition(_KEPT_HERE)
    return before if mark and text.startswith(before) else ""


def _num_common(ids: "array[int]", others: "array[int]") -> int:
    """Return the number of tokens with which both begin."""
    if ids == others[: len(ids)]:
        return len(ids)
    pairs = zip(ids, others, strict=False)
    return next(n for n, (one, other) in enumerate(pairs) if one != other)


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
