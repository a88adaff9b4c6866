"""Parse and check the messages of clients; each error names the field, the value and the limit."""

import json
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import msgspec

from quadriga.errors import InvalidRequest, PromptTooLong
from quadriga.sampling.params import Grammar, SamplingParams
from quadriga.sampling.pooling import LOGPROBS, SCORE, SCORINGS, Pooling
from quadriga.sampling.validation import UnservedTokens, check_number
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.cache import MAX_CACHE_KEY_CHARS, MAX_CACHE_TTL_S, CacheHint
from quadriga.wire.client import (
    MAX_CACHE_SALT_CHARS,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ClientMessage,
    Generate,
)
from quadriga.wire.packing import unpack_ids, unpack_integer

MAX_REQUEST_ID_CHARS = 128
MAX_TIMEOUT_S = 7 * 24 * 3600
# Bytes that hold the first fields of every message whose request_id is not too long.
NUM_PEEKED_BYTES = 1024
MAX_SHOWN_LABELS = 5
# Kinds of grammars that are JSON, and keys of a schema whose values no text has to obey.
JSON_GRAMMARS = ("json_schema", "choice", "structural_tag")
_NOTES = ("title", "description", "$comment", "default", "examples")

_decode = msgspec.msgpack.Decoder(ClientMessage, ext_hook=unpack_integer).decode


class FrameHeader(NamedTuple):
    """The first fields of a message; "" for a field that is missing or of another type."""

    tag: str
    request_id: str


def peek(frame: bytes) -> FrameHeader:
    """Return the header of a message, in time that does not grow with the message."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame[:NUM_PEEKED_BYTES])
    try:
        num_fields = unpacker.read_array_header()
        tag, _, request_id = [unpacker.unpack() if i < num_fields else "" for i in range(3)]
    except (msgpack.UnpackException, ValueError):
        return FrameHeader("", "")
    return FrameHeader(
        tag if isinstance(tag, str) else "",
        request_id[:MAX_REQUEST_ID_CHARS] if isinstance(request_id, str) else "",
    )


def only_frame(frames: list[bytes]) -> bytes:
    """Return the only frame of a message. Raise InvalidRequest for several, or one too long."""
    if len(frames) != 1:
        raise InvalidRequest(f"a message is 1 frame, this one has {len(frames)}")
    if len(frames[0]) > MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"the message is {len(frames[0])} bytes: at most {MAX_FRAME_BYTES} are taken;"
            " shorten the prompt",
            "prompt",
        )
    return frames[0]


def parse(frame: bytes) -> ClientMessage:
    """Return the message in a frame. Raise InvalidRequest if there is none."""
    try:
        message: ClientMessage = _decode(frame)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"unreadable message: {error}; see docs/protocol.md") from None
    if message.version != PROTOCOL_VERSION:
        raise InvalidRequest(
            f"version is {message.version}: this server speaks {PROTOCOL_VERSION};"
            " use a client of the same release",
            "version",
        )
    return message


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest for an id that is empty or too long."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters: 1 to {MAX_REQUEST_ID_CHARS} are allowed",
            "request_id",
        )


def check_urgency(message: Generate) -> None:
    """Raise InvalidRequest for a priority or a timeout out of range, or a long name."""
    check_number("priority", message.priority)
    _check_timeout("queue_timeout", message.queue_timeout)
    _check_timeout("timeout", message.timeout)
    _check_timeout("keep_s", message.keep_s)
    if (count := len(message.cache_salt)) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {count} characters: at most {MAX_CACHE_SALT_CHARS} are taken; send a"
            " hash of it",
            "cache_salt",
        )
    if message.cache is not None:
        _check_hint(message.cache)


def _check_hint(hint: CacheHint) -> None:
    check_cache_key(hint.key)
    if not 0 < hint.ttl_s <= MAX_CACHE_TTL_S:
        raise InvalidRequest(
            f"cache.ttl_s is {hint.ttl_s}: it must be more than 0 and at most"
            f" {MAX_CACHE_TTL_S:.0f} seconds; leave cache out to keep nothing",
            "cache",
        )
    for name in ("num_tokens", "num_messages", "num_chars"):
        if (value := getattr(hint, name) or 0) < 0:
            raise InvalidRequest(f"cache.{name} is {value}: it must be at least 0", "cache")


def check_cache_key(key: str) -> None:
    """Raise InvalidRequest for the key of a CacheHint that is too long."""
    if len(key) > MAX_CACHE_KEY_CHARS:
        raise InvalidRequest(
            f"cache.key has {len(key)} characters: at most {MAX_CACHE_KEY_CHARS} are taken; send a"
            " hash of it",
            "cache",
        )


def _check_timeout(field: str, seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"{field} is {seconds}: it must be more than 0 and at most {MAX_TIMEOUT_S} seconds"
            " (one week); leave it out for the server's own",
            field,
        )


def check_can_end(params: SamplingParams, model: ModelFiles) -> None:
    """Raise InvalidRequest if no token could end a text with a grammar."""
    if not model.eos_token_ids and not params.stop_token_ids:
        raise InvalidRequest(
            "stop_token_ids is empty, and the model names no token that ends a text: a grammar"
            " needs one; give one here",
            "stop_token_ids",
        )


def check_grammar_tokens(grammar: Grammar, unserved: UnservedTokens) -> None:
    """Raise InvalidRequest if a text of the grammar has an added token beyond the model's ids."""
    if not unserved.added:
        return
    texts: Iterator[str] = iter([grammar.text])
    if grammar.kind in JSON_GRAMMARS:
        try:
            texts = _strings_of(json.loads(grammar.text))
        except (ValueError, RecursionError):
            return  # the check of the grammar says what is wrong with it
    for text in texts:
        unserved.check_text(grammar.kind, text)


def _strings_of(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value that the texts of a grammar may have."""
    stack = [value]
    while stack:
        match stack.pop():
            case str() as text:
                yield text
            case list() as items:
                stack += items
            case dict() as members:
                yield from members
                stack += [item for key, item in members.items() if key not in _NOTES]


def check_prompt_ids(message: Generate, unserved: UnservedTokens) -> "array[int]":
    """Return the token ids that a request has in place of a text. Raise InvalidRequest."""
    if message.prompt:
        raise InvalidRequest(
            "prompt and prompt_token_ids are both given: leave one of them empty", "prompt"
        )
    return check_ids(message.prompt_token_ids or b"", "prompt_token_ids", unserved)


def check_ids(packed: bytes, field: str, unserved: UnservedTokens) -> "array[int]":
    """Return the token ids in a field's int32 bytes. Raise InvalidRequest."""
    if len(packed) % 4:
        raise InvalidRequest(
            f"{field} is {len(packed)} bytes: token ids are int32, 4 bytes each", field
        )
    ids = unpack_ids(packed)
    unserved.check_ids(field, ids)
    return ids


def check_served_tokens(model: ModelFiles) -> None:
    """Raise InvalidRequest for a request for tokens where the model makes vectors only."""
    if model.is_encoder and model.scores is not None:
        raise _is_classifier(model, "prompt")
    if model.is_encoder:
        raise InvalidRequest(
            f"the model is an encoder ({model.config['model_type']}), which makes embeddings and no"
            " text: use /v1/embeddings, or embed of a client",
            "prompt",
        )


def check_served_vector(pooling: Pooling, model: ModelFiles) -> None:
    """Raise InvalidRequest for numbers of a kind that the model does not make."""
    if pooling.method in SCORINGS:
        _check_scores(pooling, model)
    elif model.is_encoder and model.scores is not None:
        raise _is_classifier(model, "pooling")
    if model.is_encoder and pooling.method == LOGPROBS:
        raise InvalidRequest(
            f"the model is an encoder ({model.config['model_type']}), which has no probabilities of"
            " tokens: ask a model that makes text",
            "pooling",
        )


def _is_classifier(model: ModelFiles, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model is a classifier ({model.config['model_type']}), which scores texts, and makes"
        " neither text nor embeddings: use /rerank, /score or /classify, or the same methods of a"
        " client",
        field,
    )


def _check_scores(pooling: Pooling, model: ModelFiles) -> None:
    """Raise InvalidRequest for scores that the model does not have."""
    kind, scores = model.config.get("model_type"), model.scores
    if scores is None:
        raise InvalidRequest(
            f"the model ({kind}) has no scores: serve a cross-encoder or a classifier, whose"
            " config.json names …ForSequenceClassification, or a reranker such as Qwen3-Reranker",
            "pooling",
        )
    if pooling.method == SCORE and len(scores.labels) != 1:
        shown = ", ".join(scores.labels[:MAX_SHOWN_LABELS])
        raise InvalidRequest(
            f"the model has {len(scores.labels)} scores ({shown}): only a model with one ranks"
            " texts; use /classify, or classify of a client",
            "pooling",
        )
    if scores.logit_score is not None and pooling.text_pair is None:
        raise InvalidRequest(
            f"the model ({kind}) scores pairs of texts: give a second text, by /rerank or /score",
            "text_pair",
        )
    if scores.logit_score is None and pooling.instruction:
        raise InvalidRequest(
            f"the model ({kind}) has a head, and reads no instruction: leave it out", "instruction"
        )


def checked_first(message: Generate) -> str:
    """Return the first text of a pair. Raise InvalidRequest if it is none."""
    if not isinstance(message.prompt, str) or message.prompt_token_ids is not None:
        raise InvalidRequest(
            "prompt is a chat or token ids, and text_pair is given: a pair is two texts", "prompt"
        )
    return message.prompt


def check_vector_params(message: Generate) -> None:
    """Raise InvalidRequest for a request for a vector that asks for several choices."""
    if message.params.n != 1:
        raise InvalidRequest(f"n is {message.params.n}: a text has one vector; leave n out", "n")


def check_fits_whole(ids: "array[int]", limit: int, pooling: Pooling) -> None:
    """Raise for the ids of a text or pair that has none, or more than `limit` tokens, the context.

    Raises:
        InvalidRequest: there are none, or none before the last ones whose probabilities are asked.
        PromptTooLong: there are too many.
    """
    if not ids:
        raise InvalidRequest("the text is empty: it has no token, and no vector", "prompt")
    num_last = pooling.num_last
    if num_last >= len(ids):
        raise InvalidRequest(
            f"num_last is {num_last}, and the prompt has {len(ids)} tokens: it must be fewer",
            "num_last",
        )
    if len(ids) > limit:
        what = "text" if pooling.text_pair is None else "pair of texts"
        # Of the probabilities of tokens, what is cut away would be asked for.
        remedy = "" if pooling.method == LOGPROBS else ", or let its end be cut (truncate_prompt)"
        raise PromptTooLong(
            f"the {what} has {len(ids)} tokens, the model's context is {limit}; shorten it{remedy}",
            "prompt",
        )


def fit(
    ids: "array[int]",
    params: SamplingParams,
    model: ModelFiles,
    default_max_tokens: int,
    truncate: bool,
    clamp_max_new_tokens: bool = False,
) -> "tuple[array[int], SamplingParams]":
    """Return prompt and params as they will run: not empty, complete, and within the context.

    A request without max_new_tokens gets `default_max_tokens`, or what the context leaves if less.
    With `truncate` the last context_length - 1 tokens of a long prompt are kept. With that or
    `clamp_max_new_tokens`, no more tokens are generated than the context leaves, if it leaves any.

    Raises:
        PromptTooLong: prompt and max_new_tokens are more than the context.
        InvalidRequest: min_new_tokens is above max_new_tokens, or nothing can follow
            first_token_ids.
    """
    limit = model.context_length
    if not ids:
        ids = array("i", [min(model.eos_token_ids, default=0)])
    if truncate:
        ids = ids[-(limit - 1) :]
    room = limit - len(ids)
    max_new_tokens = params.max_new_tokens or min(default_max_tokens, max(room, 1))
    if truncate or clamp_max_new_tokens:
        max_new_tokens = min(max_new_tokens, max(room, 1))
    if max_new_tokens > room:
        raise PromptTooLong(
            f"prompt has {len(ids)} tokens, max_new_tokens is {max_new_tokens}, the model's context"
            f" is {limit}; shorten the prompt, ask for fewer tokens, or start the server with"
            " --allow-auto-truncate",
            "prompt" if len(ids) >= limit else "max_new_tokens",
        )
    if params.min_new_tokens > max_new_tokens:
        raise InvalidRequest(
            f"min_new_tokens is {params.min_new_tokens}: it must not be above max_new_tokens, which"
            f" is {max_new_tokens} here; ask for a larger max_new_tokens",
            "min_new_tokens",
        )
    check_first_ids(params, max_new_tokens, model)
    return ids, msgspec.structs.replace(params.with_seed(), max_new_tokens=max_new_tokens)


def check_first_ids(params: SamplingParams, max_new_tokens: int, model: ModelFiles) -> None:
    """Raise InvalidRequest if nothing can follow the tokens with which the answer begins."""
    first_ids = params.first_token_ids
    if len(first_ids) >= max_new_tokens:
        raise InvalidRequest(
            f"max_new_tokens is {max_new_tokens}: it counts the {len(first_ids)} tokens of"
            f" first_token_ids, too; ask for at least {len(first_ids) + 1}",
            "max_new_tokens",
        )
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= set(model.eos_token_ids)
    if not stop_ids.isdisjoint(first_ids):
        place = next(place for place, token_id in enumerate(first_ids) if token_id in stop_ids)
        raise InvalidRequest(
            f"first_token_ids has the stop token {first_ids[place]} as its token {place + 1} of"
            f" {len(first_ids)}, and nothing follows one; give at most {place} tokens",
            "first_token_ids",
        )
