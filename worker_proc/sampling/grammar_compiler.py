"""Compile grammars in a thread while steps run."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from quadriga.server.grammars.grammar import load_vocabulary
from quadriga.server.models.formats.tokenizer import tokenizer_json
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.sockets import Outbox
from quadriga.wire.worker import GrammarReady

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from worker_proc.sampling.grammar import CompiledGrammar

NICENESS = 10


class GrammarCompiler:
    """Compiles grammars and keeps them. The first one starts the thread and loads the vocabulary.

    Attributes:
        compiled: grammars by key.
    """

    def __init__(self, files: ModelFiles, results_address: str) -> None:
        """Create a compiler whose thread sends GrammarReady to `results_address`."""
        self.compiled: dict[bytes, CompiledGrammar] = {}
        self._files = files
        self._results_address = results_address
        self._thread = ThreadPoolExecutor(1, "grammar", self._start_thread)
        self._results: Outbox | None = None
        self._vocabulary: LLTokenizer | None = None

    def compile(self, grammar: GrammarForm, session: int) -> None:
        """Compile a grammar in the thread, which then sends GrammarReady."""
        self._thread.submit(self._compile, grammar, session)

    def compile_here(self, grammar: GrammarForm) -> str:
        """Compile a grammar in the calling thread. Return an error, or an empty string."""
        # It imports torch, which takes a second: the process must answer the launcher before that.
        from worker_proc.sampling.grammar import compile_form

        try:
            self.compiled[grammar.key] = compile_form(self._load_vocabulary(), grammar)
        except BaseException as error:  # the library's panics are not subclasses of Exception
            return f"the grammar cannot be compiled: {error}"
        return ""

    def forget(self, key: bytes) -> None:
        """Drop a compiled grammar. The key may be unknown after a restart of the worker."""
        self.compiled.pop(key, None)

    def _start_thread(self) -> None:
        """Give steps priority, if the system has priorities of threads."""
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._results = Outbox(self._results_address)

    def _compile(self, grammar: GrammarForm, session: int) -> None:
        assert self._results is not None
        self._results.send(GrammarReady(grammar.key, self.compile_here(grammar), session))

    def _load_vocabulary(self) -> "LLTokenizer":
        if self._vocabulary is None:
            files = self._files
            self._vocabulary = load_vocabulary(
                tokenizer_json(files.tokenizer_dir), files.vocab_size, files.eos_token_ids
            )
        return self._vocabulary
