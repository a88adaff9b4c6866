"""Agents beside a load that fills the pool, in simulated time."""

import json
from pathlib import Path

import pytest

from bench.agents.__main__ import main
from bench.agents.sessions import AgentTurn, read_sessions, turns_of, within
from quadriga.errors import ConfigError

FLAGS = ["simulate", "--agents", "3", "--turns", "4", "--shared", "128", "--first-prompt", "256",
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


def test_recorded_sessions_give_the_lengths_and_are_cut_where_they_are_too_long(
    tmp_path: Path,
) -> None:
    def message(role: str, num_tokens: int) -> dict[str, str]:
        return {"role": role, "content": "x" * (4 * (num_tokens - 1))}

    sent = [message("user", 100), message("user", 50), message("assistant", 10),
            message("tool", 30), message("assistant", 5), message("user", 500),
            message("assistant", 5)]  # fmt: skip
    file = tmp_path / "sessions.json"
    file.write_text(json.dumps({"cases": [{"messages": sent}, {"messages": sent[:3]}]}))
    (session,) = within(read_sessions(file), 300)
    assert turns_of(session, 300) == [AgentTurn(150, 10), AgentTurn(30, 5)]
    with pytest.raises(ConfigError, match="No such file"):
        read_sessions(tmp_path / "none")
    file.write_text("[]")
    with pytest.raises(ConfigError, match="neither a recording"):
        read_sessions(file)
