"""Log-probabilities in OpenAI's two shapes."""

from typing import Any

from quadriga.logprobs import TokenLogprob

MAX_TOP = 20
"""Of the likeliest tokens that are told of a place."""


def completion_logprobs(told: list[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """As /v1/completions has them: a list for each property. text_offset: the characters before
    the first of these tokens. The token itself is always among the likeliest."""
    offsets = []
    for token in told:
        offsets.append(text_offset)
        text_offset += len(token.text)
    return {
        "tokens": [token.text for token in told],
        "token_logprobs": [token.logprob for token in told],
        "top_logprobs": [_likeliest(token) for token in told],
        "text_offset": offsets,
    }


def _likeliest(token: TokenLogprob) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {one.bytes.decode("utf-8", "replace"): one.logprob for one in reversed(token.top)}
    return {token.text: token.logprob} | top


def chat_logprobs(told: list[TokenLogprob]) -> dict[str, Any]:
    """As /v1/chat/completions has them: an object for each token."""
    content = []
    for token in told:
        one = _token(token.bytes, token.logprob)
        one["top_logprobs"] = [_token(top.bytes, top.logprob) for top in token.top]
        content.append(one)
    return {"content": content, "refusal": None}


def _token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
