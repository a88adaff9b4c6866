"""A journal is written byte for byte as the committed one is, and read into the same requests.

If the format changes: set a new MAGIC, and run `python -m tests.unit.journal_corpus --write`.
"""

from pathlib import Path

from tests.unit.journal_corpus import (
    RESTARTED,
    WRITTEN,
    contents,
    expected,
    finish,
    hash_of,
    read_header,
    restart,
    resume,
    write,
)

EXPECTED = expected()


def test_a_run_writes_the_same_file(tmp_path: Path) -> None:
    assert write(tmp_path).hex(" ") == WRITTEN.read_bytes().hex(" ")


def test_a_file_is_read_into_the_same_requests() -> None:
    assert read_header(WRITTEN) == EXPECTED["header"]
    requests = contents(WRITTEN)
    for request, known in zip(requests, EXPECTED["requests"], strict=True):
        assert request == known


def test_the_file_has_requests_in_every_state() -> None:
    requests = contents(WRITTEN)
    reasons = {request["ended"][1] for request in requests if request["ended"]}
    assert reasons == {"stop", "length", "abort", "error"}
    going_on = [request for request in requests if not request["ended"]]
    assert any(request["tokens"] for request in going_on)
    assert any(not request["tokens"] for request in going_on)
    assert {request["settled"] for request in requests if request["ended"]} == {True, False}
    assert {request["index"] for request in requests} == {0, 1, 2}
    _seq, tokens, prompts = zip(*(request["logprobs"] for request in requests), strict=True)
    assert any(tokens)
    assert any(prompts)
    assert any("grammar" in request["submit"] for request in requests), "a grammar"


def test_a_restarted_scheduler_writes_the_same_file(tmp_path: Path) -> None:
    assert restart(WRITTEN.read_bytes(), tmp_path).hex(" ") == RESTARTED.read_bytes().hex(" ")


def test_the_file_of_a_restarted_scheduler_is_read_into_the_same_requests() -> None:
    assert contents(RESTARTED) == EXPECTED["requests"]


def test_a_scheduler_of_another_run_resumes_it_as_the_same_file(tmp_path: Path) -> None:
    resumed = resume(WRITTEN.read_bytes(), tmp_path)
    assert hash_of(resumed) == EXPECTED["resumed_by_another_run"]


def test_a_scheduler_finishes_its_requests_with_the_same_decisions(tmp_path: Path) -> None:
    assert finish(WRITTEN.read_bytes(), tmp_path) == EXPECTED["finished"]
