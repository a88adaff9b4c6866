"""Text to token ids, off the event loop where it takes long."""

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from quadriga.messages.public import ChatMessage
from tokenizer_proc.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHORT_TEXT = 2048
"""Characters that are encoded at once, in less time than a thread would take to wake up twice."""


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
        self, prompt: str | list[ChatMessage], then: "Callable[[asyncio.Future[array[int]]], None]"
    ) -> None:
        """Call `then` with a future that holds the ids (or InvalidRequest), at once or later."""
        loop = asyncio.get_running_loop()
        if _length(prompt) <= SHORT_TEXT:
            done: asyncio.Future[array[int]] = loop.create_future()
            try:
                done.set_result(self._encode(prompt))
            except Exception as error:
                done.set_exception(error)
            then(done)
        else:
            loop.run_in_executor(self._threads, self._encode, prompt).add_done_callback(then)

    def _encode(self, prompt: str | list[ChatMessage]) -> "array[int]":
        text = prompt if isinstance(prompt, str) else self._chat.render(prompt)
        return array(
            "i", self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        )


def _length(prompt: str | list[ChatMessage]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message.content) for message in prompt)
