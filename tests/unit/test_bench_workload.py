"""Prompts and schedule."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workload import Schedule, Workload, pretokenize, word
from quadriga.errors import ConfigError


def test_run_zero_sends_the_text_as_it_is() -> None:
    assert Workload(count=3, text="Hello").prompts(0) == ["Hello"] * 3


@given(st.integers(1, 40), st.integers(1, 4), st.booleans())
def test_no_two_runs_share_a_prompt(count: int, runs: int, unique: bool) -> None:
    workload = Workload(count=count, text="Hello", unique=unique)
    seen = [set(workload.prompts(run)) for run in range(runs)]
    assert len(set.union(*seen)) == sum(len(prompts) for prompts in seen)


def test_prompts_of_other_runs_differ_from_the_first_letter_on() -> None:
    workload = Workload(count=2, text="Hello")
    assert workload.prompts(1) == ["a Hello"] * 2
    assert workload.prompts(2) == ["b Hello"] * 2


def test_unique_prompts_differ_from_the_first_letter_on() -> None:
    workload = Workload(count=52, text="Hello", unique=True)
    for run in range(3):
        assert len({str(prompt)[0] for prompt in workload.prompts(run)}) == 52


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_each_number_has_a_word_of_its_own(one: int, other: int) -> None:
    assert (word(one) == word(other)) == (one == other)


def test_random_ids_have_the_length_and_the_range_and_first_ids_of_their_own() -> None:
    workload = Workload(count=20, random_ids=5, seed=3)
    prompts: list[Any] = workload.prompts(0, 1000) + workload.prompts(1, 1000)
    assert all(len(ids) == 5 and all(0 <= i < 1000 for i in ids) for ids in prompts)
    assert len({ids[0] for ids in prompts}) == 40
    assert prompts[:20] == workload.prompts(0, 1000)
    assert prompts[:20] != Workload(count=20, random_ids=5, seed=4).prompts(0, 1000)


def test_random_ids_need_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        Workload(count=1, random_ids=5).prompts(0)


def test_the_absolute_schedule_counts_from_the_start() -> None:
    schedule = Schedule(interval=0.5, absolute=True)
    assert [schedule.due(i, 10.0, previous_end=99.0) for i in range(3)] == [10.0, 10.5, 11.0]
    assert schedule.planned(2, 10.0) == 11.0


def test_the_relative_schedule_counts_from_the_submit_before() -> None:
    schedule = Schedule(interval=0.5)
    assert schedule.due(0, 10.0, previous_end=10.0) == 10.0
    assert schedule.due(1, 10.0, previous_end=10.25) == 10.75
    assert schedule.planned(1, 10.0) is None


def test_pretokenize_encodes_equal_texts_once_and_leaves_ids_alone() -> None:
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [len(text)]

    assert pretokenize(["ab", "ab", [7, 8], "abc"], encode) == [[2], [2], [7, 8], [3]]
    assert calls == ["ab", "abc"]
