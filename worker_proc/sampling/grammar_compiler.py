"""Compiles grammars in a thread beside the steps."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from quadriga.model_files.resolve import ModelFiles
from quadriga.sampling.grammar import compile_grammar, load_vocabulary
from quadriga.wire.messages.grammar import GrammarForm
from quadriga.wire.messages.worker import GrammarReady, ResultMessage
from quadriga.wire.sockets import Outbox

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NICENESS = 10


class GrammarCompiler:
    """compiled: matchers at their beginning, by key; slots take copies.

    The thread and the vocabulary come with the first grammar. results_address: where the thread
    sends what it has done, by a socket of its own.
    """

    def __init__(self, files: ModelFiles, results_address: str) -> None:
        self.compiled: dict[bytes, LLMatcher] = {}
        self._files = files
        self._results_address = results_address
        self._thread = ThreadPoolExecutor(1, "grammar", self._begin)
        self._results: Outbox | None = None
        self._vocabulary: LLTokenizer | None = None

    def compile(self, grammar: GrammarForm, session: int) -> None:
        """Begin, and come back at once. GrammarReady says when it is done."""
        self._thread.submit(self._compile, grammar, session)

    def compile_here(self, grammar: GrammarForm) -> None:
        """At once, and without an answer."""
        self._compile_or_say_why(grammar)

    def forget(self, key: bytes) -> None:
        """A grammar that is compiled, unless it was by a worker that died."""
        self.compiled.pop(key, None)

    def _begin(self) -> None:
        """Steps go first, where a system has priorities of threads."""
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._results = Outbox(self._results_address)

    def _compile(self, grammar: GrammarForm, session: int) -> None:
        assert self._results is not None
        message: ResultMessage = GrammarReady(
            grammar.key, self._compile_or_say_why(grammar), session
        )
        self._results.send(message)

    def _compile_or_say_why(self, grammar: GrammarForm) -> str:
        """Why it cannot be, or nothing."""
        try:
            self.compiled[grammar.key] = compile_grammar(self._load_vocabulary(), grammar.text)
        except BaseException as error:  # the library's panics are no Exceptions, and somebody waits
            return f"the grammar cannot be compiled: {error}"
        return ""

    def _load_vocabulary(self) -> "LLTokenizer":
        if self._vocabulary is None:
            path = self._files.tokenizer_dir / "tokenizer.json"
            self._vocabulary = load_vocabulary(
                path.read_text(encoding="utf-8"), self._files.vocab_size, self._files.eos_token_ids
            )
        return self._vocabulary
