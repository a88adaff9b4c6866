"""The servers with and without guesses take turns, for a bounded time."""

from typing import Any, cast

import pytest

from bench import speculation as bench
from bench.speculation import GuessTask
from quadriga.llm.llm import LLM

PLAIN, GUESSING = cast(LLM, "plain"), cast(LLM, "guessing")


class Clock:
    """A clock that runs take with them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[Any] = []

    def perf_counter(self) -> float:
        return self.now

    def run(self, llm: LLM, tasks: list[GuessTask]) -> bench.TimedRun:
        """Take two seconds, and three with guesses, of which half are right."""
        self.order.append(llm)
        self.now += 3.0 if llm is GUESSING else 2.0
        guesses = (1, 4, 2) if llm is GUESSING else (0, 0, 0)
        rate = 60.0 if llm is GUESSING else 90.0
        return bench.TimedRun(rate, 2 * rate, ["text"] * len(tasks), guesses)


@pytest.mark.parametrize(("seconds", "num_turns"), [(1.0, 1), (16.0, 3), (1000.0, 5)])
def test_turns_end_before_the_next_one_would_take_too_long(
    seconds: float, num_turns: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    clock = Clock()
    monkeypatch.setattr(bench, "run", clock.run)
    monkeypatch.setattr(bench, "time", clock)
    ratio = bench.measure(PLAIN, GUESSING, "chat", 4, bench.Limits(5, seconds, 16))
    assert ratio == pytest.approx(60.0 / 90.0)
    assert clock.order[:4] == [GUESSING, PLAIN, PLAIN, GUESSING][: len(clock.order)]
    assert len(clock.order) == 2 * num_turns
    cells = [cell.strip() for cell in capsys.readouterr().out.strip("|\n").split("|")]
    assert cells[:4] == ["chat", "4", "90", "0.67 (0.67 to 0.67)"]
    assert cells[5:] == [
        f"50 % of {4 * num_turns}",
        "3.0",
        f"{4 * num_turns} of {4 * num_turns}",
    ]
