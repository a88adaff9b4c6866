"""A journal is read back as far as it was written whole."""

import threading
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from quadriga.errors import ConfigError
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.cache import CacheHint
from quadriga.wire.client import ErrorInfo
from quadriga.wire.logprobs import LogprobBlock
from quadriga.wire.packing import pack_floats, pack_ids
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.journal import file
from scheduler_proc.journal import writer as journal_module
from scheduler_proc.journal.events import StepEvents
from scheduler_proc.journal.recovery import restored
from scheduler_proc.state.request import RequestStatus
from tests.unit.journal_runs import EOS, Run, outline


def test_requests_go_on_from_their_last_token_and_ends_are_known(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (a,), (b, c), (d,) = run.accept("a"), run.accept("b", n=2), run.accept("d")
    run.journal.commit()
    run.generate(a, 5, 6)
    run.generate(b, 9)
    run.journal.commit()
    run.generate(c, 4)
    c.matched_stop, c.error = 4, ErrorInfo("failed", "why")
    run.finish(c, acknowledged=False)
    run.finish(d)
    run.journal.commit()
    recovered = run.recovered()
    assert outline(recovered) == [
        ("a", 0, [5, 6], False, False),
        ("b", 0, [9], False, False),
        ("b", 1, [4], True, False),
        ("d", 0, [], True, True),
    ]
    assert recovered[0].message.params.logit_bias == {5: 1.0}
    going_on, ended = restored(recovered[0], EOS), restored(recovered[2], EOS)
    assert (going_on.tokens.tolist(), going_on.num_known_tokens) == ([7, 8, 5, 6], 4)
    assert (going_on.status, going_on.first_token_at) == (RequestStatus.WAITING, 3.0)
    assert (ended.finish_reason, ended.matched_stop, ended.error) == ("stop", 4, c.error)
    assert ended.sampling.seed == 2, "each choice has a seed of its own"


def test_a_message_is_read_back_with_its_cache_hint_and_written_without_one_as_before() -> None:
    plain = Submit(b"c", "a", pack_ids([7]), SamplingParams(), True, 1.0, 2.0)
    for message in (
        plain,
        replace(plain, tenant="t"),
        replace(plain, placement=3),
        replace(plain, adapter=AdapterRef("i", "n")),
    ):
        kept = replace(message, cache=CacheHint("k", 60.0))
        written, kept_record = (file.AcceptedRecord.of(1, m, [0]) for m in (message, kept))
        assert kept_record.submit() == kept
        assert written.submit() == message
        names = message.__struct_fields__
        assert len(msgspec.msgpack.decode(written.message)) <= 1 + names.index("cache")


def test_logprobs_are_recovered_with_their_tokens(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (request,) = run.accept("a")
    prompt, blocks = [block_of(-3.0)], [block_of(-1.0), block_of(-2.0)]
    request.prompt_logprobs = prompt
    run.journal.append(StepEvents(started=[request]))
    for token, block in zip((5, 6), blocks, strict=True):
        run.generate(request, token)
        run.add_logprobs(request, block)
        run.journal.commit()
    for _ in ("as it was written", "after a compaction"):
        (recovered,) = run.recovered()
        request = restored(recovered, EOS)
        assert (request.logprobs, request.prompt_logprobs) == (blocks, prompt)
        run.journal.compact()


def block_of(logprob: float) -> LogprobBlock:
    return LogprobBlock(pack_floats([logprob]), 1, pack_ids([3]), pack_floats([-0.5]))


def test_a_torn_tail_loses_whole_frames_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (a,) = run.accept("a")
    sizes = []
    for token in range(3, 20):
        run.generate(a, token)
        run.journal.commit()
        sizes.append(run.path.stat().st_size)
    whole = run.path.read_bytes()
    for cut in range(sizes[0], len(whole) + 1):
        run.path.write_bytes(whole[:cut])
        rounds = sum(size <= cut for size in sizes)
        assert run.recovered()[0].tokens.tolist() == list(range(3, 3 + rounds))
    for garbage in (b"\x00" * 100, b"\xc1", b"\x93\x01\x02", b"\xff" * 9):
        run.path.write_bytes(whole + garbage)
        assert len(run.recovered()[0].tokens) == len(sizes)


def test_a_file_that_has_grown_is_compacted_to_the_requests_that_still_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 20_000)
    monkeypatch.setattr(journal_module, "MAX_ENDED", 10)
    run = Run(tmp_path)
    (long,) = run.accept("long")
    (late,) = run.accept("late")
    run.finish(late, acknowledged=False)
    biggest = 0
    for number in range(2000):
        (request,) = run.accept(f"r{number}")
        run.generate(request, 5)
        run.generate(long, 6)
        run.finish(request)
        run.journal.commit()
        biggest = max(biggest, run.path.stat().st_size)
    assert biggest < 60_000
    recovered = run.recovered()
    assert outline(recovered)[:2] == [
        ("long", 0, [6] * 2000, False, False),
        ("late", 0, [], True, False),
    ]
    assert outline(recovered)[-1] == ("r1999", 0, [5], True, True)
    run.journal.compact()
    assert len(run.recovered()) == 12
    assert outline(run.recovered())[:2] == outline(recovered)[:2]


def test_an_end_that_is_acknowledged_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_ENDED", 2)
    run = Run(tmp_path)
    for name in "abcd":
        (request,) = run.accept(name)
        run.finish(request)
        run.acknowledge(request)
    run.journal.compact()
    assert [request.message.request_id for request in run.recovered()] == ["c", "d"]


def test_a_choice_that_was_forgotten_does_not_come_back_with_its_siblings(tmp_path: Path) -> None:
    run = Run(tmp_path)
    requests = run.accept("a", n=3)
    del run.journal._kept[requests[1].seq]
    run.journal.compact()
    assert [request.index for request in run.recovered()] == [0, 2]


def test_a_journal_that_outlives_its_run_is_synced_by_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "SYNC_INTERVAL_S", 0.0)
    synced = threading.Semaphore(0)
    monkeypatch.setattr("scheduler_proc.journal.file.os.fdatasync", lambda _: synced.release())
    run = Run(tmp_path, durable=True)
    assert synced.acquire(timeout=0), "a new file, at once"
    for name in "ab":
        run.accept(name)
        run.journal.commit()
        assert synced.acquire(timeout=10)
    run.journal.close()


def test_resuming_needs_to_know_what() -> None:
    for flags in ({"resume": True}, {"no_journal": True, "journal": "x"}):
        with pytest.raises(ConfigError, match="journal"):
            SchedulerArgs(**flags).validate()
