"""Turn a client's message into what the scheduler, or the client itself, is sent.

Everything here costs time and memory in proportion to the message. Short messages are prepared on
the event loop; all others by the processes of `pool.py`.
"""

import logging
from array import array

import msgspec

from quadriga.config.server_config import FrontendArgs
from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.model_files.resolve import ModelFiles
from quadriga.sampling.params import Grammar, grammar_of, without_grammar
from quadriga.sampling.stop_regex import compile_stop_regex
from quadriga.sampling.validation import validate_params
from quadriga.wire.chat_limits import check_chat, check_chat_options
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.public import (
    ChatMessage,
    ChatOptions,
    Detokenize,
    ErrorInfo,
    Generate,
    Refused,
    Text,
    Tokenize,
    Tokens,
)
from quadriga.wire.sockets import encode
from tokenizer_proc.preparation import validation as requests
from tokenizer_proc.preparation.encode import Encoder
from tokenizer_proc.preparation.sampling_defaults import sampling_defaults

MAX_INLINE_BYTES = 4096
"""A message of so many bytes is parsed, rendered and encoded in 1 to 2 ms."""


class Prepared(msgspec.Struct, tag="prepared", array_like=True, frozen=True):
    """A Generate that is ready for the scheduler.

    Attributes:
        request: the message with its prompt as `prompt_token_ids`, cut to the context where the
            client allows that, and with parameters in which nothing is left open.
        bad_words: token ids (int32 bytes) of each spelling of each of them.
        grammar: taken out of the parameters; not checked yet.
    """

    request: Generate
    bad_words: list[bytes]
    grammar: Grammar | None


Answer = Tokens | Text
Outcome = Prepared | Tokens | Text | Refused
"""What becomes of a frame. All but Prepared are public messages, for the client as they stand."""

_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def decode_outcome(data: bytes) -> Outcome:
    """Return the outcome that `Preparer.prepare_frame` has encoded."""
    outcome: Outcome = _decode_outcome(data)
    return outcome


class Preparer:
    """Check, render, encode and fit what clients send. Without state: forks may share it."""

    def __init__(self, args: FrontendArgs, model: ModelFiles, encoder: Encoder) -> None:
        self._model = model
        self._encoder = encoder
        self._truncate = args.allow_auto_truncate
        self._defaults = sampling_defaults(args.sampling_defaults, model.generation_config)

    def prepare_frame(self, frame: bytes) -> bytes:
        """Return the encoded Outcome of a Generate, Tokenize or Detokenize. Never raises."""
        try:
            message = requests.parse([frame])
            if isinstance(message, Generate):
                return encode(self.prepare(message))
            if isinstance(message, Tokenize | Detokenize):
                return encode(self.convert(message))
            raise InvalidRequest(
                f"the message is {len(frame)} bytes: one of its kind has at most {MAX_INLINE_BYTES}"
            )
        except QuadrigaError as error:
            return encode(Refused(requests.peek(frame).request_id, ErrorInfo.of(error)))

    def prepare(self, message: Generate) -> Prepared:
        """Return a request with its prompt's token ids and complete parameters.

        Raises:
            InvalidRequest: a value is out of its range, or the prompt cannot be encoded.
            PromptTooLong: prompt and max_new_tokens do not fit the context and may not be cut.
        """
        model, params = self._model, message.params
        requests.check_urgency(message)
        validate_params(params, model.vocab_size)
        for pattern in params.stop_regexes:
            compile_stop_regex(pattern)
        grammar = grammar_of(params)
        if grammar is not None:
            requests.check_can_end(params, model)
            params = without_grammar(params)
        truncate = self._truncate if message.truncate_prompt is None else message.truncate_prompt
        ids, params = requests.fit(
            self._ids(message),
            params.filled(self._defaults),
            model,
            truncate,
            message.clamp_max_new_tokens,
        )
        bad_words = self._encoder.bad_words(params.bad_words) if params.bad_words else []
        request = msgspec.structs.replace(
            message, prompt="", prompt_token_ids=pack_ids(ids), params=params, chat=ChatOptions()
        )
        return Prepared(request, bad_words, grammar)

    def convert(self, message: Tokenize | Detokenize) -> Answer:
        """Return the ids of a text, or the text of ids. Raises InvalidRequest."""
        name = message.request_id
        requests.check_request_id(name)
        if isinstance(message, Tokenize):
            return Tokens(name, pack_ids(self._encode(message.prompt, message.chat)))
        ids = requests.check_ids(message.token_ids, "token_ids", self._model.vocab_size)
        return Text(name, self._encoder.decode(ids, message.skip_special_tokens))

    def _ids(self, message: Generate) -> "array[int]":
        if message.prompt_token_ids is not None:
            return requests.check_prompt_ids(message, self._model.vocab_size)
        return self._encode(message.prompt, message.chat)

    def _encode(self, prompt: str | list[ChatMessage], chat: ChatOptions) -> "array[int]":
        try:
            if not isinstance(prompt, str):
                check_chat(prompt)
                check_chat_options(chat)
            return self._encoder.encode(prompt, chat)
        except QuadrigaError:
            raise
        except Exception as error:  # whatever the model's template or the tokenizer may raise
            logging.exception("a prompt cannot be encoded")
            raise InvalidRequest(f"prompt cannot be encoded: {error}", "prompt") from None
