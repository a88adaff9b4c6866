"""The prompts of every run."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.natural import natural_texts
from bench.load.workload import PlannedRequest, Prompt, Workload, pretokenize, word
from quadriga.errors import ConfigError
from simulator.trace import TraceRequest

REQUEST = [TraceRequest(0.0, (), 1)]


def texts(run: int = 0, count: int = 3, **changes: Any) -> list[Any]:
    workload = Workload(REQUEST * count, **{"text": "Hello", **changes})
    return [job.prompt for job in workload.jobs(run)]


def ids(run: int, *requests: TraceRequest, seed: int = 0, vocab_size: int = 1000) -> list[Any]:
    workload = Workload(requests, text=None, seed=seed)
    return [job.prompt for job in workload.jobs(run, vocab_size)]


def test_each_job_has_its_request() -> None:
    requests = [TraceRequest(0.0, (), n) for n in (1, 2)]
    assert [job.request for job in Workload(requests).jobs(0)] == requests


@given(st.integers(1, 40), st.integers(1, 4), st.booleans())
def test_no_two_runs_share_a_prompt(count: int, runs: int, unique: bool) -> None:
    seen = [set(texts(run, count, unique=unique)) for run in range(runs)]
    assert len(set.union(*seen)) == sum(len(prompts) for prompts in seen)


def test_run_zero_sends_the_text_and_others_differ_from_the_first_letter_on() -> None:
    assert texts() == ["Hello"] * 3
    assert texts(1, 2) == ["a Hello"] * 2
    assert texts(2, 2) == ["b Hello"] * 2


def test_on_request_every_run_sends_the_same_prompts() -> None:
    workload = Workload([TraceRequest(0.0, (), 1)] * 3, "Hi", repeat=True)
    assert workload.jobs(5) == workload.jobs(0)


def test_unique_prompts_differ_from_the_first_letter_on() -> None:
    for run in range(3):
        assert len({prompt[0] for prompt in texts(run, 52, unique=True)}) == 52


def test_natural_prompts_differ_and_are_drawn_by_the_seed() -> None:
    drawn = natural_texts(500, seed=3)
    assert drawn == natural_texts(500, seed=3)
    assert len(set(drawn)) == 500 and len(set(drawn) & set(natural_texts(500, seed=4))) < 25
    lengths = [len(text.split()) for text in drawn]
    assert min(lengths) >= 8 and 60 < max(lengths) < 140
    words = Counter(word for text in drawn for word in text.lower().split())
    assert len(words) > 500 and words.most_common(1)[0][1] < 0.1 * sum(lengths)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_each_number_has_a_word_of_its_own(one: int, other: int) -> None:
    assert (word(one) == word(other)) == (one == other)


def test_segments_are_shared_within_a_run_and_never_between_runs() -> None:
    requests = [TraceRequest(0.0, ((7, 20), (i, 5)), 1) for i in range(3)]
    runs = [ids(run, *requests) for run in range(4)]
    for prompts in runs:
        assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
        assert len({tuple(prompt) for prompt in prompts}) == 3
    assert len({tuple(prompts[0][:20]) for prompts in runs}) == 4
    assert runs[0] == ids(0, *requests)
    assert runs[0] != ids(0, *requests, seed=1)


def test_literal_ids_are_sent_as_they_are_and_replaced_one_by_one_in_other_runs() -> None:
    requests = [TraceRequest(0.0, (), 1, ids=(5, 9, 5, last)) for last in (7, 999)]
    assert ids(0, *requests) == [[5, 9, 5, 7], [5, 9, 5, 999]]
    for run in range(1, 20):
        one, other = ids(run, *requests)
        assert one[:3] == other[:3] and one[0] == one[2] and one[3] != other[3]
        assert not {*one} & {5, 9, 7} and all(3 <= token < 1000 for token in one + other)
    assert len({ids(run, *requests)[0][0] for run in range(20)}) == 20


@pytest.mark.parametrize("vocab_size", [None, 3])
def test_ids_need_a_vocabulary(vocab_size: int | None) -> None:
    with pytest.raises(ConfigError, match=f"vocab_size is {vocab_size}"):
        Workload(REQUEST, text=None).jobs(0, vocab_size)


def test_pretokenize_encodes_equal_texts_once_and_leaves_ids_alone() -> None:
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [len(text)]

    prompts: list[Prompt] = ["ab", "ab", [7, 8], "abc"]
    jobs = pretokenize([PlannedRequest(REQUEST[0], prompt) for prompt in prompts], encode)
    assert [job.prompt for job in jobs] == [[2], [2], [7, 8], [3]]
    assert calls == ["ab", "abc"]
