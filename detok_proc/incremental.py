"""Decode token ids to text, one token at a time.

The pieces joined are what `tokenizer.decode` gives for all ids at once, also where the bytes are no
valid UTF-8. Behind a prompt they are what it gives for prompt and answer, less the text of the
prompt: SentencePiece's decoder strips the first space of a text, and an answer that continues one
has to keep it. No piece ends within a character. Each token costs a bounded amount of work, however
long the text and however broken its bytes.

`tokenizers.decoders.DecodeStream` (0.23) does none of this, so that it is not used: it raises
"Invalid prefix encountered" for some sequences of ids, drops half a character at the end, lets text
of a prompt that it was primed with leak into the stream, and while the bytes are no valid UTF-8
decodes all of them once more for each token (1.4 ms a token after 4000).
"""

import codecs
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from quadriga.wire.to_detok import PROMPT_END_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# SentencePiece writes a space so.
WORD_START = "\u2581"
# Largest number of tokens that are held back until they are whole characters.
WINDOW_TOKENS = 32
# A character of UTF-8 has at most 4 bytes, so that this many may begin one.
MAX_OPEN_BYTES = 3
# Tokens among which one is looked for whose text is a word.
MAX_PLAIN_TRIES = 4096

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextDecoder(Protocol):
    """Decode the tokens of one text."""

    def push(self, token_id: int) -> str:
        """Return the text that is certain now, often empty."""

    def flush(self) -> str:
        """Return the rest; nothing may be pushed afterwards."""


class DecoderFactory:
    """Make the TextDecoder of each text, for one tokenizer."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._bytes = ByteTable(tokenizer) if _is_byte_level(tokenizer) else None
        self._vocabulary = Vocabulary(tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token by itself, which may be half a character."""
        if self._bytes is not None:
            return self._bytes[token_id]
        return self._vocabulary.bytes_of(token_id)

    def make(self, skip_special_tokens: bool, prompt_end: Iterable[int] = ()) -> TextDecoder:
        """Return the decoder of a new text.

        Args:
            skip_special_tokens: leave special tokens out of the text.
            prompt_end: the last PROMPT_END_TOKENS ids of the prompt that the text continues, or all
                of a shorter prompt; empty for a text of its own.
        """
        skipped = self._vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        ids = list(prompt_end)
        if self._bytes is not None:
            return ByteLevelDecoder(self._bytes, skipped, ids)
        return WindowedDecoder(self._vocabulary, skipped, ids)


class Vocabulary:
    """The tokens of a tokenizer, each by itself; `plain_id` is neither an added one nor a byte."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        ids = range(tokenizer.get_vocab_size())
        plain = (i for i in ids if i not in added and self.is_known(i) and not self.is_byte(i))
        tried = list(islice(plain, MAX_PLAIN_TRIES)) or [0]
        self.plain_id = next((i for i in tried if self.decode([i]).isalnum()), tried[0])

    def is_known(self, token_id: int) -> bool:
        """Return False for an id that only a padded vocabulary has, which leaves no text."""
        return self.tokenizer.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Return whether a token is one byte in SentencePiece's spelling, such as <0xE4>."""
        token = self.tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token in SentencePiece's spelling; empty for an unknown id."""
        token = self.tokenizer.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(WORD_START, " ").encode("utf-8")

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class ByteTable(dict[int, bytes]):
    """The bytes of each id of a byte-level tokenizer, filled as ids come up."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        self[token_id] = b"" if token is None else _token_bytes(token)
        return self[token_id]


def _token_bytes(token: str) -> bytes:
    """Return the bytes of a token; one with a character outside the alphabet stands for itself."""
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's 256 characters.

    Printable Latin-1 stands for itself; the other bytes follow from U+0100 on, in their order.
    Source: Radford et al. (2019), encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


class ByteLevelDecoder:
    """Decode tokens that are bytes (GPT-2, Llama 3, Qwen, SmolLM), which only takes UTF-8."""

    __slots__ = ("_bytes", "_prompt_text", "_skipped", "_utf8")

    def __init__(
        self, table: ByteTable, skipped: frozenset[int], prompt_end: Iterable[int] = ()
    ) -> None:
        self._bytes = table
        self._skipped = skipped
        self._utf8 = _Utf8Decoder("replace")
        # U+FFFD for the bytes at the prompt's end that may still become a character.
        self._prompt_text = ""
        for token_id in prompt_end:
            if token_id not in skipped:
                self._utf8.decode(table[token_id])
        open_bytes, _ = self._utf8.getstate()
        self._prompt_text = open_bytes.decode("utf-8", "replace")

    def push(self, token_id: int) -> str:
        """Return the text that is certain now."""
        if token_id in self._skipped:
            return ""
        return self._less_prompt(self._utf8.decode(self._bytes[token_id]))

    def flush(self) -> str:
        """Return the rest."""
        return self._less_prompt(self._utf8.decode(b"", True))

    def _less_prompt(self, text: str) -> str:
        if text and self._prompt_text:
            text, self._prompt_text = text.removeprefix(self._prompt_text), ""
        return text


class WindowedDecoder:
    """Decode tokens of every other kind, such as SentencePiece's, with `tokenizer.decode`.

    Only that function knows a tokenizer's rules. They look at a token's neighbours (a run of byte
    tokens is text only as a whole) and at the beginning of a text (whose space is stripped), so
    that the ids since the last certain text are decoded behind tokens before them, the anchor.
    These are all tokens while the text has not begun, and then a plain one and the last one. Ids
    are held back while they may still become other characters, but at most WINDOW_TOKENS of them.
    Only where WINDOW_TOKENS tokens in a row are no valid UTF-8 may the number of U+FFFD differ from
    decode's.
    """

    __slots__ = ("_anchor", "_anchor_text", "_has_begun", "_prompt_text", "_skipped",
                 "_vocabulary", "_window")  # fmt: skip

    def __init__(
        self, vocabulary: Vocabulary, skipped: frozenset[int], prompt_end: list[int] | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._has_begun = False
        self._window: list[int] = []
        # U+FFFD for the bytes at the prompt's end that may still become a character.
        self._prompt_text = ""
        if prompt_end:
            self._continue(prompt_end)

    def push(self, token_id: int) -> str:
        """Return the text that is certain now."""
        if self._is_skipped(token_id):
            return ""
        self._window.append(token_id)
        if len(self._window) >= WINDOW_TOKENS:
            return self._commit_whole_characters()
        if self._vocabulary.is_byte(token_id):
            return ""
        text = self._text_of(self._window)
        return "" if text.endswith(REPLACEMENT) else self._commit(len(self._window), text)

    def flush(self) -> str:
        """Return the rest."""
        return self._less_prompt(self._text_of(self._window))

    def _is_skipped(self, token_id: int) -> bool:
        return token_id in self._skipped or not self._vocabulary.is_known(token_id)

    def _continue(self, prompt_end: list[int]) -> None:
        """Begin behind a prompt, which may be longer than its end."""
        visible = [token_id for token_id in prompt_end if not self._is_skipped(token_id)]
        num_open = self._num_open_bytes(visible)
        self._has_begun = len(prompt_end) >= PROMPT_END_TOKENS
        self._window = visible
        whole = len(visible) - num_open
        self._commit(whole, self._text_of(visible[:whole]))
        self._prompt_text = self._text_of(self._window)

    def _num_open_bytes(self, ids: list[int]) -> int:
        """Return the number of byte tokens at the end that may still become a character."""
        for count in range(1, MAX_OPEN_BYTES + 1):
            tail = ids[-count:]
            if len(tail) < count or not self._vocabulary.is_byte(tail[0]):
                break
            utf8 = _Utf8Decoder("replace")
            utf8.decode(b"".join(map(self._vocabulary.bytes_of, tail)))
            if len(utf8.getstate()[0]) == count:
                return count
        return 0

    def _text_of(self, ids: list[int]) -> str:
        return self._vocabulary.decode(self._anchor + ids)[len(self._anchor_text) :]

    def _commit_whole_characters(self) -> str:
        """Commit all but up to three last tokens, which may begin a character of four bytes."""
        num_tokens = len(self._window)
        for count in range(num_tokens, num_tokens - 1 - MAX_OPEN_BYTES, -1):
            text = self._text_of(self._window[:count])
            if not text.endswith(REPLACEMENT):
                return self._commit(count, text)
        return self._commit(num_tokens, self._text_of(self._window))

    def _commit(self, count: int, text: str) -> str:
        """Drop the first tokens of the window, and return their text."""
        committed = self._window[:count]
        self._has_begun = self._has_begun or text != "" or len(self._anchor) >= WINDOW_TOKENS
        # A byte cannot end the anchor: it would join the run of bytes behind it.
        is_byte = self._vocabulary.is_byte
        plain = [i for i in committed if not is_byte(i)]
        if self._has_begun:
            plain_id = self._vocabulary.plain_id
            last = (plain or self._anchor or [plain_id])[-1]
            self._anchor = [last] if last == plain_id else [plain_id, last]
        else:
            self._anchor += plain if committed and is_byte(committed[-1]) else committed
        self._anchor_text = self._vocabulary.decode(self._anchor)
        del self._window[:count]
        return self._less_prompt(text)

    def _less_prompt(self, text: str) -> str:
        if text and self._prompt_text:
            text, self._prompt_text = text.removeprefix(self._prompt_text), ""
        return text


def _is_byte_level(tokenizer: "Tokenizer") -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps] == ["ByteLevel"]
