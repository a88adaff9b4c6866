"""Agents beside a load that fills the pool, in simulated time and on servers."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from bench.agents.__main__ import main
from bench.agents.live import (
    AgentRun,
    AnsweredCall,
    LoadShape,
    SessionReplay,
    by_turn,
    figures,
    known_runs,
    usage_of,
)
from bench.agents.sessions import (
    AgentTurn,
    DrawnShape,
    drawn_sessions,
    read_sessions,
    turns_of,
    within,
)
from quadriga.errors import ConfigError, RequestFailed
from tests.unit.http.measured_ring import MeasuredRing
from tests.unit.scripted_ring import ScriptedRing, gateway_before

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


def test_drawn_sessions_grow_evenly_and_share_their_beginning() -> None:
    shape = DrawnShape(3, 4, shared=100, first_prompt=300, last_prompt=900, answer=20)
    sessions = drawn_sessions(shape, seed=1)
    assert sessions == drawn_sessions(shape, seed=1)
    firsts = [session.calls[0].body["messages"] for session in sessions]
    assert len({json.dumps(first[0]) for first in firsts}) == 1, "the system prompt"
    assert len({json.dumps(first[1]) for first in firsts}) == 3
    for session in sessions:
        assert [len(call.body["messages"]) for call in session.calls] == [2, 4, 6, 8]
        lengths = [turn.num_new + turn.num_answer for turn in turns_of(session, 10_000)]
        assert all(150 < length < 450 for length in lengths), lengths
        for before, after in pairwise(session.calls):
            before_turns, after_turns = before.body["messages"], after.body["messages"]
            assert after_turns[: len(before_turns)] == before_turns


async def test_a_replay_sends_every_turn_in_order_beside_the_load() -> None:
    sessions = drawn_sessions(DrawnShape(2, 3, 10, 30, 60, 5), seed=1)
    ring = MeasuredRing()
    async with gateway_before(ring) as (url, _):
        replay = SessionReplay(url, "tiny", "10m", 0.01, LoadShape(200.0, 20, 4), seed=2)
        answered = await replay.run(sessions)
    of_agents = [call for call in answered if call.agent >= 0]
    assert sorted((call.agent, call.turn) for call in of_agents) == [
        (agent, turn) for agent in range(2) for turn in range(3)
    ]
    for call in of_agents:
        assert (call.num_prompt, call.num_cached, call.num_generated) == (32, 16, 5)
        assert call.ttft_s is not None and 0 < call.ttft_s <= call.seconds
    sent = [(prompt, params, options["cache"]) for prompt, params, options in ring.submitted]
    chats = [each for each in sent if not isinstance(each[0], str)]
    assert len(chats) == 6
    assert all(hint is not None and hint.ttl_s == 600 for _, _, hint in chats)
    assert {hint.key for _, _, hint in chats} == {"bench-0", "bench-1"}
    assert all(params.max_new_tokens == 5 and params.ignore_eos for _, params, _ in chats)


async def test_a_request_that_fails_ends_the_replay_with_its_reason() -> None:
    sessions = drawn_sessions(DrawnShape(2, 3, 10, 30, 60, 5), seed=1)
    async with gateway_before(ScriptedRing(["a"], chat=False)) as (url, _):
        replay = SessionReplay(url, "tiny", "", 0.01, LoadShape(0.0, 20, 4), seed=2)
        with pytest.raises(RequestFailed, match=r"turn 0: 400: .*no chat template"):
            await replay.run(sessions)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"choices": []}, None),
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 2}}, (9, 0, 2)),
        (
            {"usage": {"prompt_tokens": 9, "completion_tokens": 2,
                       "prompt_tokens_details": {"cached_tokens": 8}}},
            (9, 8, 2),
        ),
        (
            {"type": "message_delta",
             "usage": {"input_tokens": 3, "cache_read_input_tokens": 4,
                       "cache_creation_input_tokens": 2, "output_tokens": 1}},
            (9, 4, 1),
        ),
        (
            {"type": "response.completed", "response": {
                "usage": {"input_tokens": 9, "output_tokens": 1,
                          "input_tokens_details": {"cached_tokens": 5}}}},
            (9, 5, 1),
        ),
    ],
)  # fmt: skip
def test_usage_is_read_of_every_api(
    event: dict[str, object], expected: tuple[int, int, int] | None
) -> None:
    assert usage_of(event) == expected


def answered(agent: int, turn: int, num_prompt: int, num_cached: int) -> AnsweredCall:
    return AnsweredCall(agent, turn, float(turn), 0.5 + turn, 1.0, num_prompt, num_cached, 4)


def test_the_figures_count_turns_after_the_first_and_what_was_computed_again() -> None:
    calls = [answered(0, 0, 100, 0), answered(0, 1, 200, 96), answered(0, 2, 300, 16),
             answered(1, 0, 100, 64), answered(1, 1, 200, 64), answered(-1, 0, 50, 0)]  # fmt: skip
    row = figures([AgentRun("ours", 0, {}, calls)])
    assert row["turns"] == 3
    assert row["computed a turn"] == round((104 + 284 + 136) / 3)
    assert (row["new"], row["sent"], row["evicted"], row["others"]) == (100, 233, 1, 1)
    assert by_turn([AgentRun("ours", 0, {}, calls)]) == {"server": "ours", "1": 0.5, "2": 1.5,
                                                         "3": 2.5}  # fmt: skip


def test_a_run_of_the_same_load_is_read_back_and_one_of_another_is_not(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    runs = [AgentRun("a", 0, {"agents": "2"}, [answered(0, 0, 1, 0)]), AgentRun("a", 0, {}, [])]
    file.write_bytes(b"\n".join(map(msgspec.json.encode, runs)) + b"\n")
    assert known_runs(file, {"agents": "2"}) == runs[:1]
    assert known_runs(tmp_path / "none", {}) == []
