"""Where choices of requests have ended, for clients that ask for them again."""

from collections import OrderedDict

from tokenizer_proc.replicas.placed import ChoiceOwner, Name

# Ended requests of each replica whose place is remembered.
MAX_ENDED = 4096


class EndedRequests:
    """The owners of ended choices, of which the oldest requests are forgotten.

    Args:
        num_replicas: largest number of replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        self._max = MAX_ENDED * num_replicas
        self._owners: OrderedDict[Name, dict[int, ChoiceOwner]] = OrderedDict()

    def note(self, name: Name, index: int, owner: ChoiceOwner) -> None:
        """Remember where a choice has ended, unless a later placement of it has ended, too."""
        owners = self._owners.setdefault(name, {})
        self._owners.move_to_end(name)
        known = owners.get(index)
        if known is None or owner.placement >= known.placement:
            owners[index] = owner
        while len(self._owners) > self._max:
            self._owners.popitem(last=False)

    def owner_of(self, name: Name, index: int) -> ChoiceOwner | None:
        """Return the replica that can replay the end of a choice; None: not known."""
        return self._owners.get(name, {}).get(index)

    def forget(self, name: Name) -> None:
        """Forget a request: a new one of its name begins."""
        self._owners.pop(name, None)

    def forget_replica(self, replica: int) -> None:
        """Forget what has ended at a replica that is gone."""
        for name, owners in list(self._owners.items()):
            left = {index: owner for index, owner in owners.items() if owner.replica != replica}
            if left:
                self._owners[name] = left
            else:
                del self._owners[name]
