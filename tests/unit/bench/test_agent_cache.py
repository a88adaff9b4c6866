"""Agents beside a load that fills the pool, in simulated time."""

import pytest

from bench.agent_cache import main

FLAGS = ["--agents", "3", "--turns", "4", "--shared", "128", "--first-prompt", "256",
         "--last-prompt", "640", "--answer", "16", "--think-s", "30", "--load-rate", "1.5",
         "--load-prompt", "300", "--pool-tokens", "5120"]  # fmt: skip


def computed(line: str) -> int:
    return int(line.split("|")[2].split()[0])


def test_turns_that_ask_to_stay_cached_compute_what_is_new(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(FLAGS) == 0
    head, _names, _rule, without, kept, _info = capsys.readouterr().out.splitlines()
    lowest = int(head.split("ideal: ")[1].split()[0])
    assert lowest == computed(kept) < computed(without)


def test_without_a_share_of_the_pool_a_hint_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*FLAGS, "--", "--cache-pin-fraction", "0"]) == 0
    without, kept = capsys.readouterr().out.splitlines()[3:5]
    assert without.split("|")[2:] == kept.split("|")[2:]
