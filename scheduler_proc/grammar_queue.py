"""Which grammars the worker has compiled, and who waits for one.

The worker keeps what it is told to keep, so that no request finds its grammar gone.
"""

from collections import OrderedDict

from quadriga.wire.messages.worker import CompileGrammar, ForgetGrammar, GrammarReady
from scheduler_proc.durability.step_output import Sender
from scheduler_proc.state.request import Request

KEPT_UNUSED = 128
"""Grammars that the worker keeps although no request has them, for those that come."""


class GrammarQueue:
    """Holds requests back until the worker has compiled what their text must obey."""

    def __init__(self, worker: Sender) -> None:
        self._worker = worker
        self._users: dict[bytes, int] = {}
        self._waiting: dict[bytes, dict[int, Request]] = {}
        self._unused: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Requests that are held back."""
        return sum(map(len, self._waiting.values())) if self._waiting else 0

    def forget_all(self) -> None:
        """Another worker has none of them."""
        self._users.clear()
        self._waiting.clear()
        self._unused.clear()

    def arrived(self, request: Request) -> None:
        """A request that has a grammar: the worker compiles it, if it does not have it."""
        grammar = request.grammar
        assert grammar is not None
        if grammar.key not in self._users:
            self._users[grammar.key] = 0
            self._waiting[grammar.key] = {}
            self._worker.send(CompileGrammar(grammar))
        self._users[grammar.key] += 1
        self._unused.pop(grammar.key, None)
        if grammar.key in self._waiting:
            self._waiting[grammar.key][request.seq] = request

    def is_held_back(self, request: Request) -> bool:
        grammar = request.grammar
        return grammar is not None and request.seq in self._waiting.get(grammar.key, ())

    def answered(self, ready: GrammarReady) -> list[Request]:
        """Those who have waited for it. Nobody has where a worker was asked that died, and then
        the next one once more."""
        if ready.key not in self._waiting:
            return []
        requests = list(self._waiting.pop(ready.key).values())
        if ready.error:
            del self._users[ready.key]
        elif not self._users[ready.key]:
            self._keep_unused(ready.key)
        return requests

    def ended(self, request: Request) -> None:
        """A request ends, wherever it stood."""
        grammar = request.grammar
        if grammar is None or grammar.key not in self._users:
            return
        self._users[grammar.key] -= 1
        if grammar.key in self._waiting:
            self._waiting[grammar.key].pop(request.seq, None)
        elif not self._users[grammar.key]:
            self._keep_unused(grammar.key)

    def _keep_unused(self, key: bytes) -> None:
        self._unused[key] = None
        if len(self._unused) > KEPT_UNUSED:
            oldest, _ = self._unused.popitem(last=False)
            del self._users[oldest]
            self._worker.send(ForgetGrammar(oldest))
