"""Log-probabilities in OpenAI's two shapes, and in vLLM's of a prompt."""

import codecs
from typing import Any

from quadriga.client.logprobs import TokenLogprob


class CompletionLogprobs:
    """As /v1/completions has them, a list for each property, for one choice: whole or in pieces.

    text_offset: the characters before the first token that is told of.
    """

    def __init__(self, text_offset: int) -> None:
        self._offset = text_offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def told(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        """The token itself is always among the likeliest. A token within a character has the
        offset of that character."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.bytes))
        return {
            "tokens": [_name(token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": offsets,
        }


def _likeliest(token: TokenLogprob) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {_name(one.bytes): one.logprob for one in reversed(token.top)}
    return {_name(token.bytes): token.logprob} | top


def _name(data: bytes) -> str:
    """Half a character is called by its bytes, as OpenAI does it: many are U+FFFD alike."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


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


def prompt_logprobs(told: list[TokenLogprob]) -> list[dict[str, Any] | None]:
    """As vLLM has them: for each token a map by ids, of the likeliest and of itself. rank: null
    where it is not among them."""
    return [None if token.logprob is None else _by_id(token) for token in told]


def _by_id(token: TokenLogprob) -> dict[str, Any]:
    found = {str(token.token_id): _ranked(token.bytes, token.logprob, None)}
    for rank, one in enumerate(token.top, 1):
        found[str(one.token_id)] = _ranked(one.bytes, one.logprob, rank)
    return found


def _ranked(data: bytes, logprob: float | None, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": data.decode("utf-8", "replace")}
