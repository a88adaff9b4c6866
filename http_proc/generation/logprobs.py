"""Logprobs in OpenAI's two formats, and prompt logprobs in vLLM's."""

import codecs
import re
from typing import Any

from quadriga.client.types import LikelyToken, TokenLogprob

# What special tokens look like: <s>, <|im_end|>, [EOS].
_SPECIAL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class CompletionLogprobs:
    """Format the logprobs of one choice for /v1/completions, at once or chunk by chunk.

    Args:
        text_offset: number of characters before the first token.
    """

    def __init__(self, text_offset: int) -> None:
        self._offset = text_offset
        self._rest = ""  # of the text: what no token was found for yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def render(self, tokens: list[TokenLogprob], text: str) -> dict[str, Any]:
        """Return OpenAI's four lists for the next tokens.

        The token itself is always in `top_logprobs`. A token that ends within a character has the
        offset of that character. A special token adds no characters where the text lacks it.

        Args:
            tokens: the next tokens.
            text: the text that came with them, which may end before that of the tokens does.
        """
        self._rest += text
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            piece = self._decoder.decode(token.bytes)
            if _SPECIAL.fullmatch(piece) and not self._rest.startswith(piece):
                continue
            self._offset += len(piece)
            self._rest = self._rest[len(piece) :]
        return {
            "tokens": [_name(token.bytes) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogprob) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top = {_name(likely.bytes): likely.logprob for likely in reversed(token.top)}
    return {_name(token.bytes): token.logprob} | top


def _name(data: bytes) -> str:
    """Return the token's text, or its bytes as OpenAI spells them if it is half a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: list[TokenLogprob], has_ids: bool = False) -> dict[str, Any]:
    """Return logprobs in the format of /v1/chat/completions: one object per token.

    Tokens that were chosen by id and are among the likeliest ones are listed once. has_ids: each
    token has its id, as in llama.cpp.
    """
    content = []
    for token in tokens:
        entry = _token(token, has_ids)
        listed = {top.token_id: top for top in token.top}.values()
        entry["top_logprobs"] = [_token(top, has_ids) for top in listed]
        content.append(entry)
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob | LikelyToken, has_id: bool) -> dict[str, Any]:
    data = token.bytes
    entry = {
        "token": data.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(data)
    }  # fmt: skip
    return entry | {"id": token.token_id} if has_id else entry


def prompt_logprobs(tokens: list[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Return logprobs in vLLM's format: per token a map by ids, of the top tokens and itself.

    `rank` is null if the token is not among the top tokens.
    """
    return [None if token.logprob is None else _by_id(token) for token in tokens]


def _by_id(token: TokenLogprob) -> dict[str, Any]:
    by_id = {str(token.token_id): _ranked(token.bytes, token.logprob, None)}
    for rank, likely in enumerate(token.top, 1):
        by_id[str(likely.token_id)] = _ranked(likely.bytes, likely.logprob, rank)
    return by_id


def _ranked(data: bytes, logprob: float | None, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": data.decode("utf-8", "replace")}
