"""Check the grammars of requests in other processes, before the requests are submitted."""

import asyncio
import json
import subprocess
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from quadriga.errors import InvalidRequest, RequestFailed
from quadriga.programs import command_of
from quadriga.sampling.params import Grammar
from quadriga.server.models.resolve import ModelFiles
from tokenizer_proc.intake.overload import check_room

NUM_CHECKERS = 2
# Distinct grammars that may wait, of new requests and of requests that were admitted before.
MAX_PENDING, MAX_PENDING_OF_ADMITTED = 64, 1024
# After so long, the start of the process included, a process that has not answered is killed.
MAX_CHECK_S = 20.0
MAX_REMEMBERED_FORMS = 128
# A process may die of something else than the grammar that it checks.
MAX_ATTEMPTS = 2


class GrammarValidator:
    """Turn grammars into the form that the worker compiles, off the event loop.

    Each of its threads has a process of `sandbox.py`, started for the thread's first grammar.
    """

    def __init__(self, model: ModelFiles) -> None:
        eos = ",".join(str(i) for i in sorted(model.eos_token_ids))
        sandbox = command_of("tokenizer_proc.intake.grammar_sandbox")
        self._command = [*sandbox, str(model.tokenizer_dir), str(model.vocab_size), eos]
        self._threads = ThreadPoolExecutor(NUM_CHECKERS, thread_name_prefix="grammar")
        self._of_thread = threading.local()
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_closed = False
        self._forms: OrderedDict[Grammar, str] = OrderedDict()
        self._pending: dict[Grammar, asyncio.Future[str]] = {}

    def known_form(self, grammar: Grammar) -> str | None:
        """Return the form of a grammar that was checked lately, else None."""
        form = self._forms.get(grammar)
        if form is not None:
            self._forms.move_to_end(grammar)
        return form

    async def check(self, grammar: Grammar, is_new: bool) -> str:
        """Return a grammar's form. Requests with the same grammar wait for one check.

        MAX_PENDING holds where the request is new, that is, was not admitted before.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
            QueueFull: too many distinct grammars wait.
            RequestFailed: the processes that check it die, or the server stops.
        """
        form = self.known_form(grammar)
        if form is not None:
            return form
        pending = self._pending.get(grammar)
        if pending is None:
            limit = MAX_PENDING if is_new else MAX_PENDING_OF_ADMITTED
            check_room(len(self._pending), limit, "grammars wait to be checked")
            loop = asyncio.get_running_loop()
            pending = loop.run_in_executor(self._threads, self._check_in_thread, grammar)
            self._pending[grammar] = pending
            pending.add_done_callback(partial(self._remember, grammar))
        return await asyncio.shield(pending)

    def close(self) -> None:
        """End the processes, even in the middle of a check. Waiting checks are cancelled."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.copy():
            process.kill()

    def _remember(self, grammar: Grammar, checked: "asyncio.Future[str]") -> None:
        del self._pending[grammar]
        if checked.cancelled() or checked.exception() is not None:
            return
        self._forms[grammar] = checked.result()
        if len(self._forms) > MAX_REMEMBERED_FORMS:
            self._forms.popitem(last=False)

    # --- in a thread ------------------------------------------------------------------------------

    def _check_in_thread(self, grammar: Grammar) -> str:
        for _ in range(MAX_ATTEMPTS):
            if self._is_closed:
                raise RequestFailed("the server is stopping")
            try:
                form, error = self._ask_process(grammar)
                break
            except (OSError, ValueError):
                self._end_process()
        else:
            raise RequestFailed("the grammar check failed; the server's log says why")
        if error:
            raise InvalidRequest(f"{grammar.kind} cannot be compiled: {error}", grammar.kind)
        return form

    def _ask_process(self, grammar: Grammar) -> tuple[str, str]:
        """Return (form, error). Raise OSError or ValueError if the process died."""
        process = self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(MAX_CHECK_S, process.kill)
        watchdog.start()
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            form, error = json.loads(process.stdout.readline())
            return form, error
        finally:
            watchdog.cancel()

    def _process(self) -> "subprocess.Popen[str]":
        """Return this thread's process, started if there is none. It ends with its stdin."""
        process: subprocess.Popen[str] | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._processes.add(process)
        return process

    def _end_process(self) -> None:
        """End this thread's process, which has not answered; the next grammar gets a new one."""
        process: subprocess.Popen[str] | None = getattr(self._of_thread, "process", None)
        if process is not None:
            self._of_thread.process = None
            self._processes.discard(process)
            process.kill()
            with suppress(OSError), process:  # unflushed input cannot be written any more
                pass
