"""The grammars that the worker has compiled, and the requests that wait for one.

The worker keeps a grammar until a ForgetGrammar arrives, so that no request loses its grammar.
"""

from collections import OrderedDict

from quadriga.wire import sockets
from quadriga.wire.worker import CompileGrammar, ForgetGrammar, GrammarReady
from scheduler_proc.held_requests import HeldRequests
from scheduler_proc.state.request import Request

MAX_UNUSED = 128  # grammars that the worker keeps for requests to come


class GrammarQueue(HeldRequests[bytes]):
    """Hold requests back until the worker has compiled their grammar."""

    def __init__(self, worker: sockets.Sender) -> None:
        super().__init__()
        self._worker = worker
        self._num_users: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, None] = OrderedDict()

    def holds(self, request: Request) -> bool:
        """Return whether a request is held back."""
        grammar = request.grammar
        return grammar is not None and self._is_held(grammar.key, request)

    def forget_all(self) -> None:
        """Forget everything: a new worker has no grammar."""
        self._num_users.clear()
        self._held.clear()
        self._unused.clear()

    def add(self, request: Request) -> bool:
        """Take in a request that has a grammar. Return whether it has to wait for the worker."""
        grammar = request.grammar
        assert grammar is not None
        if grammar.key not in self._num_users:
            self._num_users[grammar.key] = 0
            self._held[grammar.key] = {}
            self._worker.send(CompileGrammar(grammar))
        self._num_users[grammar.key] += 1
        self._unused.pop(grammar.key, None)
        if grammar.key not in self._held:
            return False
        self._held[grammar.key][request.seq] = request
        return True

    def on_ready(self, ready: GrammarReady) -> list[Request]:
        """Return the requests that have waited for a grammar; none for one that was forgotten."""
        if ready.key not in self._held:
            return []
        requests = self._release(ready.key)
        if ready.error:
            del self._num_users[ready.key]
        elif not self._num_users[ready.key]:
            self._keep_unused(ready.key)
        return requests

    def remove(self, request: Request) -> None:
        """Remove a request that ended, wherever it stands."""
        grammar = request.grammar
        if grammar is None or grammar.key not in self._num_users:
            return
        self._num_users[grammar.key] -= 1
        if grammar.key in self._held:
            self._held[grammar.key].pop(request.seq, None)
        elif not self._num_users[grammar.key]:
            self._keep_unused(grammar.key)

    def _keep_unused(self, key: bytes) -> None:
        self._unused[key] = None
        if len(self._unused) > MAX_UNUSED:
            oldest, _ = self._unused.popitem(last=False)
            del self._num_users[oldest]
            self._worker.send(ForgetGrammar(oldest))
