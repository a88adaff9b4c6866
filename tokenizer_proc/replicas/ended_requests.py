"""Where requests have ended, for clients that ask for them again."""

from collections import OrderedDict

from tokenizer_proc.replicas.placed import Name

# Ended requests of each replica whose place is remembered.
MAX_ENDED = 4096


class EndedRequests:
    """The replicas of ended requests, the oldest of which are forgotten.

    Args:
        num_replicas: largest number of replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        self._max = MAX_ENDED * num_replicas
        self._replicas: OrderedDict[Name, int] = OrderedDict()

    def note(self, name: Name, replica: int) -> None:
        """Remember where a request has ended."""
        self._replicas.pop(name, None)
        self._replicas[name] = replica
        while len(self._replicas) > self._max:
            self._replicas.popitem(last=False)

    def replica_of(self, name: Name) -> int | None:
        """Return the replica that can replay the end of a request; None: not known."""
        return self._replicas.get(name)

    def forget_replica(self, replica: int) -> None:
        """Forget what has ended at a replica that is gone."""
        self._replicas = OrderedDict((n, at) for n, at in self._replicas.items() if at != replica)
