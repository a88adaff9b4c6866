"""The server's clock never jumps, a suspension is no time that passed, and timings make sense."""

import time
from collections.abc import Iterator

import pytest

from quadriga import clock
from quadriga.client.types import Timings
from quadriga.clock import Countdown, RunningTime


@pytest.fixture
def own_offset() -> Iterator[None]:
    """What a test sets is taken back."""
    before = clock.offset()
    yield
    clock.use_offset(before)


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """The steady clock of the process, set by hand."""
    hand = Hand()
    monkeypatch.setattr(time, "monotonic", hand)
    return hand


def test_the_clock_does_not_follow_the_jumps_of_the_wall_clock(
    monotonic: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clock.now() == clock.offset() + monotonic.time
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monotonic.time += 2.0
    assert clock.now() == pytest.approx(before + 2.0)


def test_processes_with_one_offset_read_one_clock(own_offset: None, monotonic: Hand) -> None:
    launchers = clock.offset() - 3600.0  # a launcher that began before the wall clock was set
    clock.use_offset(float(str(launchers)))
    assert clock.offset() == launchers
    assert clock.now() == launchers + monotonic.time


def test_running_time_is_the_clocks_while_it_is_read_often_and_stands_still_in_between() -> None:
    hand = Hand()
    running = RunningTime(1.0, hand)
    for _ in range(8):
        hand.time += 0.5
        running.now()
    assert running.now() == 4.0
    hand.time += 3600.0
    assert running.now() == 5.0
    hand.time += 0.25
    assert running.now() == 5.25


def test_a_countdown_ends_in_its_time_and_loses_next_to_nothing_to_a_suspension() -> None:
    hand = Hand()
    countdown = Countdown(10.0, max_tick_s=0.5, clock=hand)
    while seconds := countdown.left_to_wait():
        assert seconds <= 0.25
        hand.time += seconds
    assert hand.time == pytest.approx(110.0) and countdown.left() == 0.0
    suspended = Countdown(10.0, max_tick_s=0.5, clock=hand)
    hand.time += 3600.0
    assert suspended.left() == 9.5
    assert Countdown(0.0, clock=hand).left_to_wait() == 0.0


def timings(ahead: float, delivered: float = 110.0) -> Timings:
    """Of a request that took from 100 to 110, with a server whose clock is so far ahead."""
    times = [ahead + stamp for stamp in (101.0, 102.0, 103.0, 105.0, 109.0)]
    received, tokenized, admitted, first_token, detokenized = times
    return Timings(
        100.0, received, tokenized, admitted, first_token, detokenized, delivered,
        token_times=[ahead + 105.0, ahead + 108.0],
    )  # fmt: skip


def stamps(of: Timings) -> list[float]:
    return [
        of.submitted, of.received, of.tokenized, of.admitted, of.first_token, *of.token_times,
        of.detokenized, of.delivered,
    ]  # fmt: skip


def test_timings_of_clocks_that_agree_stay_as_they_are() -> None:
    for ahead in (0.0, 1.0, -1.0):
        reconciled = timings(ahead)
        reconciled.reconcile()
        assert reconciled == timings(ahead)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 1.5, -1.5, 1e9])
def test_timings_of_another_clock_are_moved_together_into_the_clients_time(ahead: float) -> None:
    moved = timings(ahead)
    moved.reconcile()
    expected = [100.0, 101.0, 102.0, 103.0, 105.0, 105.0, 108.0, 109.0, 110.0]
    assert stamps(moved) == pytest.approx(expected)


def test_timings_that_never_fit_and_stages_that_were_never_reached_make_no_negative_time() -> None:
    cut = timings(3600.0, delivered=104.0)
    cut.reconcile()
    assert stamps(cut) == sorted(stamps(cut))
    refused = Timings(100.0, received=3700.0, tokenized=3700.5, detokenized=3701.0, delivered=103.0)
    refused.reconcile()
    assert refused.admitted == refused.first_token == 0.0
    assert [refused.received, refused.detokenized] == pytest.approx([101.0, 102.0])
    nothing = Timings(100.0, delivered=101.0)
    nothing.reconcile()
    assert nothing == Timings(100.0, delivered=101.0)
