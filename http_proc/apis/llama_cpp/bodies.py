"""Request and answer bodies of /infill. The docstrings are the descriptions in /openapi.json."""

from typing import Annotated, Any, Literal

import msgspec

from http_proc.protocol.errors import ApiError, QueueHint
from http_proc.protocol.schema import RequestBody, Top
from quadriga.sampling.limits import MAX_SEED


class InfillFile(msgspec.Struct):
    """A file that gives context."""

    text: str
    filename: str = ""


class InfillRequest(RequestBody):
    """POST /infill.

    input_prefix, input_suffix: the texts before and after the gap. input_extra: other files, which
    come first. prompt: the begin of the text that fills the gap. response_fields: the fields of the
    answer to return; "a/b" is field b of a. n_predict: the largest number of tokens; below 0: the
    server's default. seed: below 0: drawn at random. n_probs: number of top tokens for each token.
    logit_bias: [[id, bias], …] or {id: bias}; false forbids a token. The sampling fields have the
    defaults of this server. The fields after logit_bias have no effect.
    """

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[InfillFile] = msgspec.field(default_factory=list)
    stream: bool = False
    response_fields: list[str] | None = None
    model: str | None = None
    n_predict: int = -1
    seed: Annotated[int, msgspec.Meta(le=MAX_SEED)] = -1
    grammar: str = ""
    n_probs: Top = 0
    logit_bias: list[tuple[int, float | bool]] | dict[str, float | bool] = msgspec.field(
        default_factory=list
    )
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_indent: int | None = None
    n_keep: int | None = None
    n_cache_reuse: int | None = None
    samplers: list[str] | str | None = None
    t_max_prompt_ms: float | None = None
    t_max_predict_ms: float | None = None
    repeat_last_n: int | None = None
    timings_per_token: bool | None = None
    return_tokens: bool | None = None


class InfillTimings(msgspec.Struct):
    """Numbers of tokens, and times of the prompt and of the answer in ms."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillAnswer(msgspec.Struct, kw_only=True):
    """A text that fills the gap; the request may ask for some of the fields only.

    tokens_predicted: number of its tokens. tokens_evaluated: length of the prompt. tokens_cached:
    number of tokens of the prompt and of the text. stop_type: eos, word or limit.
    """

    content: str = ""
    tokens: list[int] = []
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    stop_type: Literal["eos", "word", "limit"] = "eos"
    stopping_word: str = ""
    timings: InfillTimings | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    truncated: bool = False
    has_new_line: bool = False
    stop: bool = True
    index: int = 0
    id_slot: int = 0


class LlamaCppError(QueueHint):
    """What went wrong. code: the HTTP status."""

    code: int
    message: str
    type: str


class LlamaCppErrorAnswer(msgspec.Struct):
    """The body of an answer with an error status, in llama.cpp's format."""

    error: LlamaCppError


def error_body(error: ApiError) -> bytes:
    """Return an error in llama.cpp's format."""
    body = error.answer.error
    detail = LlamaCppError(error.status, body.message, body.type)
    detail.take_hint(body)
    return msgspec.json.encode(LlamaCppErrorAnswer(detail))
