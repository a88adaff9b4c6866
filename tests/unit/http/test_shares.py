"""How bounds are divided among tenants."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_proc.core.shares import SharedBound, Shares
from quadriga.server.config.frontend_args import TenantArgs
from quadriga.server.tenants import Tenant, TenantFile, TenantIndex


class Tenants:
    """A key file."""

    def __init__(self, **weights: float) -> None:
        self.index = TenantIndex(
            Tenant(name=name, key=f"sha256:{name}", weight=weight)
            for name, weight in weights.items()
        )


def shares(**weights: float) -> Shares:
    file: Any = Tenants(**weights)
    return Shares(TenantArgs(keys="keys.yaml"), file)


def taken(bound: SharedBound, owner: str, tries: int = 100) -> int:
    return sum(bound.take(owner) for _ in range(tries))


def test_without_tenants_one_owner_may_have_all() -> None:
    bound = SharedBound(Shares(TenantArgs(), None), 8)
    assert taken(bound, "a hash of a key") == 8
    assert not bound.take("the hash of another key")
    bound.give_back("a hash of a key")
    assert bound.take("the hash of another key")


def test_a_tenant_that_takes_what_it_can_leaves_the_share_of_each_other() -> None:
    bound = SharedBound(shares(alice=1, bob=1, tiny=1), 8)
    assert taken(bound, "alice") == 5
    for owner in ("bob", "tiny", "an operator's key"):
        assert taken(bound, owner) == 1
    assert bound.total == 8


def test_shares_follow_the_weights() -> None:
    bound = SharedBound(shares(alice=3, bob=1), 1000)
    assert taken(bound, "bob", 2000) == 1000 - 300 - 100
    assert taken(bound, "alice", 2000) == 300
    assert taken(bound, "an operator's key", 2000) == 100


def test_more_tenants_than_room_get_one_each_and_the_bound_holds() -> None:
    bound = SharedBound(shares(**{f"t{number}": 1 for number in range(20)}), 8)
    assert [taken(bound, f"t{number}") for number in range(20)] == [1] * 8 + [0] * 12


def test_addresses_leave_room_for_one_more() -> None:
    bound = SharedBound(Shares(TenantArgs(tenants_by="address"), None), 8)
    assert taken(bound, "10.0.0.1") == 6
    assert taken(bound, "10.0.0.2") >= 1


def test_a_changed_key_file_changes_the_shares() -> None:
    file: Any = Tenants(alice=1)
    bound = SharedBound(Shares(TenantArgs(keys="keys.yaml"), file), 8)
    assert taken(bound, "alice") == 6
    file.index = Tenants(bob=1).index
    assert taken(bound, "bob") == 2  # what alice has is now that of no tenant
    bound.give_back("alice", 6)
    assert bound.used == {"bob": 2}


def test_the_largest_is_the_one_with_the_most_for_its_weight() -> None:
    assert shares(alice=10, bob=1).largest({"alice": 50, "bob": 6, "": 5}) == "bob"
    assert Shares(TenantArgs(), None).largest({"": 3}) == ""


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(1, 50),
    weights=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100), max_size=6),
    moves=st.lists(st.tuples(st.sampled_from("abcdefx"), st.integers(-3, 5)), max_size=60),
)
def test_the_bound_holds_and_who_has_nothing_gets_its_share(
    limit: int, weights: dict[str, float], moves: list[tuple[str, int]]
) -> None:
    divided = shares(**weights)
    bound = SharedBound(divided, limit)
    for owner, amount in moves:
        if amount > 0:
            bound.take(owner, amount)
        elif amount and bound.used[owner] >= -amount:
            bound.give_back(owner, -amount)
        assert 0 <= bound.total <= limit
        assert min(bound.used.values(), default=1) > 0
    parties = divided.by_party(bound.used)
    for owner in weights:
        if limit >= len(weights) + 1 and not parties[owner] and limit // 2 >= len(weights) + 1:
            assert bound.take(owner)
            bound.give_back(owner)


@pytest.mark.parametrize("amount", [1, 300])
def test_the_shares_of_a_real_file_are_those_of_its_entries(tmp_path: Path, amount: int) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: a, curve: a, weight: 2}\n- {name: b, curve: b}\n")
    bound = SharedBound(Shares(TenantArgs(keys=str(path)), TenantFile(path)), 800)
    assert bound.take("b", 500)
    assert not bound.take("b", amount)
    assert bound.take("a", 200)
