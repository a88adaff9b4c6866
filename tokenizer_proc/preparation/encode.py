"""Encode text to token ids, and decode them."""

from array import array
from typing import TYPE_CHECKING

from quadriga.errors import InvalidRequest
from quadriga.wire.messages.from_client import ChatMessage, ChatOptions
from tokenizer_proc.preparation.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The tokenizers library takes about 200 bytes of memory for a byte of text (150 to 195 with
# byte-level BPE), so that the longest text takes 1.6 GiB.
MAX_TEXT_BYTES = 8 * 1024 * 1024
MAX_BAD_WORD_TOKENS = 32


def _leading_ids(tokenizer: "Tokenizer") -> list[int]:
    """Return the ids that a tokenizer puts before every text, such as that of <bos>."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    starts = range(len(full) - len(plain) + 1)
    found = [start for start in starts if full[start : start + len(plain)] == plain]
    return full[: found[0]] if found else []


class Encoder:
    """Encode texts and chats, and decode token ids."""

    def __init__(self, tokenizer: "Tokenizer", chat: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._leading_ids = _leading_ids(tokenizer)

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
        num_bytes = len(text.encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"the prompt's text is {num_bytes} bytes: at most {MAX_TEXT_BYTES} are encoded;"
                " shorten it, or send token ids",
                "prompt",
            )
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        leading = self._leading_ids if ids and not is_chat else []
        return array("i", ids if ids[: len(leading)] == leading else leading + ids)

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
