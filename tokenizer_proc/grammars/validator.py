"""Grammars of requests, checked before anybody else sees them."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from quadriga.errors import InvalidRequest, QueueFull, RequestFailed
from quadriga.model_files.resolve import ModelFiles
from quadriga.sampling.params import Grammar

CHECKED_AT_ONCE = 2
MAX_WAITING, MAX_WAITING_ACCEPTED = 64, 1024
"""Different ones: for new requests, and for those that were let in before and come again."""
RETRY_AFTER = 1.0
"""Seconds. Most grammars take milliseconds, and none more than half a second."""
MAX_CHECK_S = 20.0
"""For one grammar, and the start of the process that checks it; then the process is killed."""
REMEMBERED = 128
TRIES = 2
"""A process may die of something else than the grammar that it was at."""

Then = Callable[[asyncio.Future[str]], None]


class GrammarValidator:
    """Turns grammars into the form that the worker compiles, off the event loop.

    Each of its threads has a process that does the work, started when the first grammar comes.
    """

    def __init__(self, model: ModelFiles) -> None:
        eos = ",".join(str(i) for i in sorted(model.eos_token_ids))
        path = str(model.tokenizer_dir / "tokenizer.json")
        module = [sys.executable, "-m", "tokenizer_proc.grammars.sandbox"]
        self._command = [*module, path, str(model.vocab_size), eos]
        self._threads = ThreadPoolExecutor(CHECKED_AT_ONCE, thread_name_prefix="grammar")
        self._mine = threading.local()
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_closed = False
        self._forms: OrderedDict[Grammar, str] = OrderedDict()
        self._asked: dict[Grammar, list[Then]] = {}

    def check(self, grammar: Grammar, then: Then, is_new: bool) -> None:
        """Call `then` with a future that holds the grammar's form, or InvalidRequest, or QueueFull;
        at once where the grammar was checked lately, or too many wait. Requests that want the same
        one wait together. is_new: the request was not let in before."""
        if grammar in self._asked:
            self._asked[grammar].append(then)
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str] = loop.create_future()
        if grammar in self._forms:
            self._forms.move_to_end(grammar)
            done.set_result(self._forms[grammar])
            then(done)
            return
        limit = MAX_WAITING if is_new else MAX_WAITING_ACCEPTED
        if len(self._asked) >= limit:
            why = (
                f"{limit} grammars wait to be checked, the most that may; try again in"
                f" {RETRY_AFTER:g} s"
            )
            done.set_exception(QueueFull(why, RETRY_AFTER))
            then(done)
            return
        self._asked[grammar] = [then]
        future = loop.run_in_executor(self._threads, self._ask, grammar)
        future.add_done_callback(lambda answer: self._answered(grammar, answer))

    def close(self) -> None:
        """End the processes, whatever they are at. What waits for them is not answered."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes.copy():
            process.kill()

    def _answered(self, grammar: Grammar, answer: "asyncio.Future[str]") -> None:
        if answer.cancelled():
            return
        if answer.exception() is None:
            self._forms[grammar] = answer.result()
            if len(self._forms) > REMEMBERED:
                self._forms.popitem(last=False)
        loop = asyncio.get_running_loop()
        for then in self._asked.pop(grammar):
            loop.call_soon(then, answer)  # so that what goes wrong with one concerns no other

    def _ask(self, grammar: Grammar) -> str:
        for _ in range(TRIES):
            if self._is_closed:
                raise RequestFailed("the server is stopping")
            try:
                form, error = self._answer_of_process(grammar)
                break
            except (OSError, ValueError):
                self._end_process()
        else:
            raise RequestFailed("the grammar check failed; the server's log says why")
        if error:
            raise InvalidRequest(f"{grammar.kind} cannot be compiled: {error}", grammar.kind)
        return str(form)

    def _answer_of_process(self, grammar: Grammar) -> list[str]:
        """The form, and what is wrong. OSError or ValueError where the process died."""
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(MAX_CHECK_S, process.kill)
        watchdog.start()
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            answer: list[str] = json.loads(process.stdout.readline())
            return answer
        finally:
            watchdog.cancel()

    def _process(self) -> "subprocess.Popen[str]":
        """This thread's; it leaves when its stdin ends."""
        process: subprocess.Popen[str] | None = getattr(self._mine, "process", None)
        if process is None:
            process = self._mine.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._processes.add(process)
        return process

    def _end_process(self) -> None:
        """It does not answer as it should: the next grammar has another one."""
        process: subprocess.Popen[str] | None = getattr(self._mine, "process", None)
        if process is not None:
            self._mine.process = None
            self._processes.discard(process)
            process.kill()
            with suppress(OSError), process:  # what was written to it cannot be flushed any more
                pass
