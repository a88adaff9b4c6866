"""A journal is written byte for byte as the committed one is, and read into the same requests.

Where the format changes: a new MAGIC, and `python -m tests.unit.journal_corpus --write`.
"""

from pathlib import Path

from tests.unit.journal_corpus import (
    TAKEN_UP,
    WRITTEN,
    contents,
    expected,
    finish,
    hash_of,
    header,
    resume,
    take_up,
    write,
)

KNOWN = expected()


def test_a_run_writes_the_same_file(tmp_path: Path) -> None:
    assert write(tmp_path).hex(" ") == WRITTEN.read_bytes().hex(" ")


def test_a_file_is_read_into_the_same_requests() -> None:
    assert header(WRITTEN) == KNOWN["header"]
    found = contents(WRITTEN)
    for one, known in zip(found, KNOWN["requests"], strict=True):
        assert one == known


def test_the_file_has_requests_in_every_state() -> None:
    requests = contents(WRITTEN)
    reasons = {one["ended"][1] for one in requests if one["ended"]}
    assert reasons == {"stop", "length", "abort", "error"}
    going_on = [one for one in requests if not one["ended"]]
    assert any(one["tokens"] for one in going_on)
    assert any(not one["tokens"] for one in going_on)
    assert {one["settled"] for one in requests if one["ended"]} == {True, False}
    assert {one["index"] for one in requests} == {0, 1, 2}
    _seq, tokens, prompts = zip(*(one["logprobs"] for one in requests), strict=True)
    assert any(tokens)
    assert any(prompts)
    assert any(one["submit"][12] for one in requests), "a grammar"


def test_a_scheduler_of_the_same_run_takes_it_up_as_the_same_file(tmp_path: Path) -> None:
    assert take_up(WRITTEN.read_bytes(), tmp_path).hex(" ") == TAKEN_UP.read_bytes().hex(" ")


def test_what_was_taken_up_is_read_into_the_same_requests() -> None:
    assert contents(TAKEN_UP) == KNOWN["requests"]


def test_a_scheduler_of_another_run_resumes_it_as_the_same_file(tmp_path: Path) -> None:
    resumed = resume(WRITTEN.read_bytes(), tmp_path)
    assert hash_of(resumed) == KNOWN["resumed_by_another_run"]


def test_a_scheduler_finishes_its_requests_with_the_same_frames(tmp_path: Path) -> None:
    assert finish(WRITTEN.read_bytes(), tmp_path) == KNOWN["finished"]
