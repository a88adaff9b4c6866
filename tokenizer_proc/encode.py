"""Text to token ids and back, off the event loop where it takes long."""

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from quadriga.errors import InvalidRequest
from quadriga.messages.arrays import pack_ids
from quadriga.messages.public import ChatMessage, ChatOptions
from tokenizer_proc.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")

SHORT_TEXT = 2048
"""Characters that are encoded at once, in less time than a thread would take to wake up twice."""
MAX_BAD_WORD_TOKENS = 32
SHORT_IDS = 1024
"""Token ids that are decoded at once."""


class Encoder:
    """Encodes plain text and chats, neither with added special tokens.

    A long text goes to one of `workers` threads: the library lets go of Python's lock while it
    encodes a batch, so that nothing else waits for it.
    """

    def __init__(self, tokenizer: "Tokenizer", chat: ChatTemplate, workers: int) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")

    def encode(
        self,
        prompt: str | list[ChatMessage],
        chat: ChatOptions,
        then: "Callable[[asyncio.Future[array[int]]], None]",
    ) -> None:
        """Call `then` with a future that holds the ids (or InvalidRequest), at once or later."""
        is_short = _length(prompt) <= SHORT_TEXT and not chat.tools
        self._run(is_short, lambda: self._encode(prompt, chat), then)

    def decode(
        self,
        ids: "array[int]",
        skip_special_tokens: bool,
        then: "Callable[[asyncio.Future[str]], None]",
    ) -> None:
        """Call `then` with a future that holds the text, at once or later."""
        self._run(len(ids) <= SHORT_IDS, lambda: self._decode(ids, skip_special_tokens), then)

    def bad_words(self, words: list[str]) -> list[bytes]:
        """The token ids (int32 bytes) that each of these may be generated as: at the beginning of a
        text or within a word, and behind a space. Raises InvalidRequest for a word of too many."""
        spellings = [text for word in words for text in (word, " " + word.lstrip(" "))]
        encodings = self._tokenizer.encode_batch_fast(spellings, add_special_tokens=False)
        ids_of_all = {tuple(encoding.ids): None for encoding in encodings if encoding.ids}
        longest = max(map(len, ids_of_all), default=0)
        if longest > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words has a word of {longest} tokens: at most {MAX_BAD_WORD_TOKENS} are"
                " allowed; shorten it",
                "bad_words",
            )
        return [pack_ids(ids) for ids in ids_of_all]

    def _run(
        self, at_once: bool, work: Callable[[], T], then: "Callable[[asyncio.Future[T]], None]"
    ) -> None:
        loop = asyncio.get_running_loop()
        if not at_once:
            loop.run_in_executor(self._threads, work).add_done_callback(then)
            return
        done: asyncio.Future[T] = loop.create_future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        then(done)

    def _encode(self, prompt: str | list[ChatMessage], chat: ChatOptions) -> "array[int]":
        text = prompt if isinstance(prompt, str) else self._chat.render(prompt, chat)
        return array(
            "i", self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        )

    def _decode(self, ids: "array[int]", skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode_batch([ids.tolist()], skip_special_tokens)[0])


def _length(prompt: str | list[ChatMessage]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message.content) for message in prompt)
