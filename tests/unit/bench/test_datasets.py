"""Conversations of a file, and the flags that name a dataset."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli.options import Options, parse
from bench.load.datasets import Exchange, Sample, read_sharegpt, sample
from quadriga.errors import ConfigError
from simulator.trace import TraceRequest, write_trace


class WordTokenizer:
    """A tokenizer with a token for each word."""

    def encode(self, text: str, add_special_tokens: bool) -> "WordTokenizer":
        assert not add_special_tokens
        self.ids = [*range(len(text.split()))]
        return self


def words(text: str) -> int:
    return len(text.split())


def exchange(prompt: int, answer: int) -> Exchange:
    return Exchange("p " * prompt, "a " * answer)


def write(path: Path, *exchanges: Exchange) -> Path:
    turns = [[{"from": "human", "value": e.prompt}, {"from": "gpt", "value": e.answer}]
             for e in exchanges]  # fmt: skip
    path.write_text(json.dumps([{"id": "x", "conversations": t} for t in turns]))
    return path


@pytest.fixture
def conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("bench.cli.options.tokenizer_of", lambda *_: WordTokenizer())
    path = write(tmp_path / "chats.json", *(exchange(4 + n, 50 + n) for n in range(10)))
    return f"--dataset-name sharegpt --dataset-path {path} --num-prompts 6"


def lengths(options: Options) -> list[tuple[int, int]]:
    texts: Any = options.load.workload.text
    requests = options.load.workload.requests
    return [(words(t), r.max_new_tokens) for t, r in zip(texts, requests, strict=True)]


def test_only_what_has_two_turns_is_an_exchange(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    one, two = {"value": "a", "from": "human"}, {"value": "b"}
    path.write_text(json.dumps([{"conversations": [one, two, one]}, {"conversations": [one]}, {}]))
    assert read_sharegpt(path) == [Exchange("a", "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is no list of"), ('[{"conversations": [5]}]', "is no list of"), ("[]", "of two turns")],
)
def test_an_invalid_dataset_file_is_refused_with_the_reason(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_sharegpt(tmp_path / "f.json")


def test_a_sample_leaves_out_what_is_too_short_or_too_long() -> None:
    usable = [exchange(4, 4), exchange(1024, 1024), exchange(10, 20)]
    others = [exchange(3, 4), exchange(4, 3), exchange(1025, 4), exchange(1024, 1025)]
    found = sample(others + usable, 3, words, seed=1)
    assert sorted(s.answer_tokens for s in found) == [4, 20, 1024]
    assert found == sample(others + usable, 3, words, seed=1)
    assert Sample(usable[0].prompt, 4) in found
    with pytest.raises(ConfigError, match=r"has 3 conversations .* lower --num-requests"):
        sample(others + usable, 4, words, seed=1)


def test_answers_are_as_long_as_the_files_unless_the_command_line_says_how_long(
    conversations: str,
) -> None:
    of_file = lengths(parse(conversations.split()))
    assert len(of_file) == 6 and all(answer - prompt == 46 for prompt, answer in of_file)
    given = lengths(parse([*conversations.split(), "--max-new-tokens", "64"]))
    assert {answer for _, answer in given} == {64}


def test_conversations_come_at_a_rate_and_differ_from_run_to_run(conversations: str) -> None:
    options = parse([*conversations.split(), "--request-rate", "5", "--burstiness", "inf"])
    requests = options.load.workload.requests
    assert [round(r.at, 1) for r in requests] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    first, second = ([job.prompt for job in options.load.workload.jobs(run)] for run in (0, 1))
    assert second == [f"a {prompt}" for prompt in first]


def test_a_trace_is_a_dataset_too(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [TraceRequest(0.0, ((1, 4),), 2)])
    flags = f"--dataset-name trace --dataset-path {tmp_path / 't'}".split()
    assert parse(flags).load.workload == parse(["--trace", str(tmp_path / "t")]).load.workload


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dataset-name random", "random has no effect without --random-input-len: add it"),
        ("--dataset-name shared-prefix", "has no effect without --prefix-groups: add it"),
        ("--dataset-name sharegpt", "has no effect without --dataset-path: add it"),
        ("--dataset-path x", "--dataset-path has no effect without --dataset-name: add it"),
        ("--dataset-name random --random-input-len 4 --dataset-path x", "no effect with"),
        ("--dataset-name sharegpt --dataset-path x --turns 2", "--turns would have no effect"),
        ("--dataset-name sharegpt --dataset-path /no/such", "/no/such cannot be read"),
        ("--dataset-name sharegpt --dataset-path x --backend openai", "add --tokenizer MODEL"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    conversations: str, flags: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags.split())
