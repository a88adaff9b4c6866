"""Turn texts, pairs of texts and chats into token ids, and token ids into text."""

from array import array
from typing import TYPE_CHECKING, NamedTuple

from quadriga.errors import InvalidRequest
from quadriga.sampling.pooling import Pooling
from quadriga.wire.client import ChatMessage, ChatOptions
from tokenizer_proc.preparation.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The tokenizers library takes about 200 bytes of memory for a byte of text (150 to 195 with
# byte-level BPE), so that the longest text takes 1.6 GiB.
MAX_TEXT_BYTES = 8 * 1024 * 1024
MAX_BAD_WORD_TOKENS = 32


def _ids_around(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and behind every text, such as that of <bos>."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    starts = range(len(full) - len(plain) + 1)
    found = [start for start in starts if full[start : start + len(plain)] == plain]
    return (full[: found[0]], full[found[0] + len(plain) :]) if found else ([], [])


class PairForm(NamedTuple):
    """What a tokenizer writes around the two texts of a pair.

    Attributes:
        leading, between, trailing: ids before the first text, between both, and behind the second.
        num_first_between: number of `between` that are of the first type; None: all tokens of a
            pair are.
    """

    leading: list[int]
    between: list[int]
    trailing: list[int]
    num_first_between: int | None

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> "PairForm | None":
        """Return the form of a tokenizer's pairs; None if it has none."""
        text = tokenizer.encode("a", add_special_tokens=False).ids
        encoded = tokenizer.encode("a", "a")
        ids, types = encoded.ids, encoded.type_ids
        begin = _find(ids, text, 0)
        middle = None if begin is None else _find(ids, text, begin + len(text))
        if not text or begin is None or middle is None or types[begin] == 1:
            return None
        end = begin + len(text)
        is_typed = types[middle] == 1
        num_first = types[end:middle].count(0) if is_typed else None
        return cls(ids[:begin], ids[end:middle], ids[middle + len(text) :], num_first)

    @property
    def num_added(self) -> int:
        """Number of ids beside those of the two texts."""
        return len(self.leading) + len(self.between) + len(self.trailing)


def _find(ids: list[int], part: list[int], begin: int) -> int | None:
    """Return where a part of ids is, from `begin` on; None if it is not there."""
    places = range(begin, len(ids) - len(part) + 1)
    return next((place for place in places if ids[place : place + len(part)] == part), None)


def fitted_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths of two texts that are cut to `room` tokens together, the longest first.

    As in tokenizers, `TruncationStrategy.LongestFirst`.
    """
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)


class Encoder:
    """Encode texts, pairs and chats, and decode token ids."""

    def __init__(self, tokenizer: "Tokenizer", chat: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._leading_ids, self._trailing_ids = _ids_around(tokenizer)
        self._pair_form = PairForm.of(tokenizer)

    @property
    def takes_chats(self) -> bool:
        """Whether there is a template that writes chats as text."""
        return self._chat.exists

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
        ids = self._ids_of(text)
        leading = self._leading_ids if ids and not is_chat else []
        return array("i", ids if ids[: len(leading)] == leading else leading + ids)

    def encode_whole(self, text: str, limit: int | None) -> "array[int]":
        """Return the ids of a text between those that the tokenizer puts around texts.

        Args:
            text: the text.
            limit: number of ids, to which the end of the text is cut; None: it is not cut.

        Raises:
            InvalidRequest: the text is over MAX_TEXT_BYTES.
        """
        ids, leading, trailing = self._ids_of(text), self._leading_ids, self._trailing_ids
        if limit is not None:
            ids = ids[: max(limit - len(leading) - len(trailing), 0)]
        return array("i", leading + ids + trailing)

    def encode_pair(
        self, first: str, second: str, pooling: Pooling, limit: int | None
    ) -> "tuple[array[int], int]":
        """Return the ids of a pair of texts as the tokenizer writes it.

        Args:
            first: the first text.
            second: the second text.
            pooling: the number of ids to which the end of each text is cut.
            limit: number of ids, to which the ends of both texts are cut; None: they are not cut.

        Returns:
            The ids, and the number of ids of the first type; 0: all are.

        Raises:
            InvalidRequest: a text is over MAX_TEXT_BYTES, or the tokenizer writes no pairs.
        """
        form = self._pair_form
        if form is None:
            raise InvalidRequest(
                "the model's tokenizer.json has no form of a pair of texts: serve a model that"
                " ranks, or send one text",
                "text_pair",
            )
        one = self._ids_of(first)[: pooling.max_first_tokens]
        other = self._ids_of(second)[: pooling.max_second_tokens]
        if limit is not None:
            room = max(limit - form.num_added, 0)
            num_one, num_other = fitted_lengths(len(one), len(other), room)
            one, other = one[:num_one], other[:num_other]
        num_first = form.num_first_between
        if num_first is not None:
            num_first += len(form.leading) + len(one)
        ids = form.leading + one + form.between + other + form.trailing
        return array("i", ids), num_first or 0

    def _ids_of(self, text: str) -> list[int]:
        """Return the ids of a text alone. Raise InvalidRequest if it is over MAX_TEXT_BYTES."""
        num_bytes = len(text.encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"the prompt's text is {num_bytes} bytes: at most {MAX_TEXT_BYTES} are encoded;"
                " shorten it, or send token ids",
                "prompt",
            )
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

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
