"""Text to ids or back, for who wants to know: answered here, without the scheduler."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.messages.arrays import pack_ids
from quadriga.messages.public import Detokenize, ErrorInfo, Refused, Text, Tokenize, Tokens
from tokenizer_proc import requests
from tokenizer_proc.encode import Encoder

Answer = Callable[[msgspec.Struct], None]


def convert(
    message: Tokenize | Detokenize, encoder: Encoder, vocab_size: int, answer: Answer
) -> None:
    """Call `answer` with Tokens, Text or Refused, now or later. Raises InvalidRequest."""
    name = message.request_id
    requests.check_request_id(name)
    if isinstance(message, Tokenize):
        encoder.encode(
            message.prompt,
            message.chat,
            lambda ids: _converted(name, ids, lambda i: Tokens(name, pack_ids(i)), answer),
        )
    else:
        encoder.decode(
            requests.check_ids(message.token_ids, "token_ids", vocab_size),
            message.skip_special_tokens,
            lambda text: _converted(name, text, lambda t: Text(name, t), answer),
        )


def _converted(
    name: str,
    done: "asyncio.Future[Any]",
    make: Callable[[Any], msgspec.Struct],
    answer: Answer,
) -> None:
    try:
        message = make(done.result())
    except QuadrigaError as error:
        message = Refused(name, ErrorInfo.of(error))
    except Exception as error:
        logging.exception("encoding failed")
        message = Refused(name, ErrorInfo.of(InvalidRequest(f"cannot be converted: {error}")))
    answer(message)
