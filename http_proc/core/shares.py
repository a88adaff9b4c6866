"""Shares: how a bound that all tenants have together is divided among them.

Half of a bound is shared out: each tenant has a part of that half by its weight, which no other
tenant can take. The other half is for those that come first. Without tenants, one has all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from http_proc.core.caller import current_caller
from quadriga.server.config.frontend_args import TenantArgs
from quadriga.server.tenants import TenantFile, TenantIndex

# What belongs to no tenant of the key file: requests with keys of --api-key, and tenants that were
# removed. Together they are a party of weight 1.
NO_TENANT = ""


class _Weights(NamedTuple):
    """The weights of all parties that have a share, and their sum."""

    of: Mapping[str, float]
    total: float

    def share(self, party: str, limit: int) -> int:
        """Return what no other party can take of a bound: at least one."""
        return max(1, int(limit / 2 * self.of.get(party, 1.0) / self.total))


class Shares:
    """Who shares the bounds of a server, and in which proportions.

    A party is a tenant, or NO_TENANT. With --tenants-by address each address that holds anything is
    a party, and one more is expected.

    Args:
        tenants: the flags.
        file: the tenants of --keys; None without the flag.
    """

    def __init__(self, tenants: TenantArgs, file: TenantFile | None) -> None:
        self.has_tenants = tenants.has_tenants
        self._file = file
        self._index: TenantIndex | None = None
        self._of_file = _Weights({}, 1.0)

    def party(self, owner: str) -> str:
        """Return the party to which an owner belongs. `owner`: a name as Caller.owner."""
        is_party = self.has_tenants and (not self._file or owner in self._file.index.by_name)
        return owner if is_party else NO_TENANT

    def by_party(self, used: Mapping[str, int]) -> Counter[str]:
        """Return what each party has, of what each owner has."""
        sums: Counter[str] = Counter()
        for owner, amount in used.items():
            sums[self.party(owner)] += amount
        return sums

    def has_room(self, owner: str, used: Mapping[str, int], limit: int, amount: int = 1) -> bool:
        """Return whether an owner may take a further amount.

        Args:
            owner: who takes it.
            used: what each owner has.
            limit: of all together.
            amount: how much is taken.
        """
        total = sum(used.values()) + amount
        if total > limit or not self.has_tenants:
            return total <= limit
        parties, party = self.by_party(used), self.party(owner)
        weights = self._weights(parties)
        if total + limit // 2 + len(weights.of) <= limit:  # whatever the others have
            return True
        if parties[party] + amount <= weights.share(party, limit):
            return True
        reserved = sum(
            max(0, weights.share(other, limit) - parties[other])
            for other in weights.of
            if other != party
        )
        return total + reserved <= limit

    def largest(self, parties: Mapping[str, int]) -> str:
        """Return the party that has the most in proportion to its weight."""
        return max(parties, key=lambda party: (parties[party] / self._weight(party), party))

    def _weights(self, parties: Mapping[str, int]) -> _Weights:
        if self._file is None:
            held = [party for party, amount in parties.items() if amount > 0]
            of = dict.fromkeys((NO_TENANT, *held), 1.0)
            return _Weights(of, float(len(of)))
        if self._file.index is not self._index:
            self._index = self._file.index
            names = {name: tenant.weight for name, tenant in self._index.by_name.items()}
            self._of_file = _Weights({**names, NO_TENANT: 1.0}, sum(names.values()) + 1.0)
        return self._of_file

    def _weight(self, party: str) -> float:
        tenant = self._file.index.by_name.get(party) if self._file else None
        return 1.0 if tenant is None else tenant.weight


class SharedBound:
    """What the owners hold of one thing, within a bound.

    Args:
        shares: how it is divided.
        limit: the bound.

    Attributes:
        used: what each owner holds.
    """

    def __init__(self, shares: Shares, limit: int) -> None:
        self._shares = shares
        self.limit = limit
        self.used: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """What all owners hold."""
        return self.used.total()

    def take(self, owner: str, amount: int = 1, is_needed: bool = False) -> bool:
        """Take an amount, and return whether that was done.

        Args:
            owner: who takes it.
            amount: how much.
            is_needed: take it also without room, for what was accepted before.
        """
        if not is_needed and not self._shares.has_room(owner, self.used, self.limit, amount):
            return False
        self.used[owner] += amount
        return True

    def give_back(self, owner: str, amount: int = 1) -> None:
        """Give back what was taken."""
        self.used[owner] -= amount
        if self.used[owner] <= 0:
            del self.used[owner]


_holding: ContextVar[list[tuple[SharedBound, str, int]] | None] = ContextVar(
    "holding", default=None
)
"""What one request holds of several bounds: bound, owner and amount."""


@contextmanager
def holding() -> Iterator[None]:
    """Let the request of this task hold what it takes by `hold` to the end of a `with` block."""
    held: list[tuple[SharedBound, str, int]] = []
    token = _holding.set(held)
    try:
        yield
    finally:
        _holding.reset(token)
        for bound, owner, amount in held:
            bound.give_back(owner, amount)


def hold(bound: SharedBound, amount: int) -> bool:
    """Take an amount of a bound for the caller's request, and return whether there was room.

    Without `holding` nothing is taken.
    """
    held, owner = _holding.get(), current_caller().owner
    if held is None or not amount:
        return True
    if not bound.take(owner, amount):
        return False
    held.append((bound, owner, amount))
    return True
