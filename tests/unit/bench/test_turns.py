"""Variants of a command line, the order of their turns, their ratios and their table."""

from pathlib import Path

import pytest

from bench import turns as module
from bench.client.server import LAUNCHER
from bench.turns import Column, Ratios, Turns, split_common, variant_of
from quadriga.errors import ConfigError


def test_a_variant_has_flags_and_perhaps_another_checkout(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").touch()
    here = variant_of("new: --page-size 32")
    assert (here.name, here.flags, here.launcher) == ("new", ["--page-size", "32"], LAUNCHER)
    there = variant_of(f"old: @{tmp_path} --page-size 32")
    assert (there.flags, there.checkout) == (["--page-size", "32"], tmp_path)
    assert there.config(["--page-size", "8", "--max-batch-size", "5"]).scheduler.max_batch_size == 5


def test_common_flags_are_behind_two_dashes() -> None:
    assert split_common(["a: ", "--", "--seed", "1"]) == (["a: "], ["--seed", "1"])
    assert split_common(["a: "]) == (["a: "], [])


def test_a_flag_that_the_server_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="--nonsense"):
        variant_of("a: --nonsense").config([])


class Clock:
    """A clock that turns take with them."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "num_turns"), [(1.0, 1), (16.0, 3), (1000.0, 5)])
def test_turns_alternate_and_end_before_the_next_one_would_take_too_long(
    seconds: float, num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    order = []
    for turn, name in Turns(["a", "b"]).order(5, seconds):
        order.append((turn, name))
        clock.now += {"a": 2.0, "b": 3.0}[name]
    alternating = [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert order[:6] == alternating[: len(order)]
    assert len(order) == 2 * num_turns


def test_ratios_are_taken_turn_by_turn() -> None:
    turns: Turns[float | None] = Turns(["a", "b"])
    turns.results = {"a": [1.0, 10.0, 4.0, None], "b": [2.0, 5.0, 4.0, 7.0]}
    found = turns.ratios("b", lambda value: value)
    assert found == Ratios([2.0, 0.5, 1.0])
    assert str(found) == "1.00 (0.50 to 2.00)"
    columns: list[Column[float | None]] = [
        Column("rate", lambda value: value, 1, has_ratio=True),
        Column("unknown", lambda _: None),
    ]
    assert turns.table(columns).splitlines()[2:] == [
        "| rate | 4.0 | 4.5, 1.00 (0.50 to 2.00) x |",
        "| unknown | n/a | n/a |",
    ]
