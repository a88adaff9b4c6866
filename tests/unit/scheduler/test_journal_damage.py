"""A damaged journal is read up to the damage: a beginning of what was written, and no more."""

import random
import stat
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.wire.logprobs import LogprobBlock
from quadriga.wire.packing import pack_floats, pack_ids
from quadriga.wire.sockets import encode
from scheduler_proc.journal.file import (
    FRAME_HEAD,
    MAGIC,
    AcceptedRecord,
    Ended,
    JournalFile,
    JournalRecord,
    LogprobRecord,
    TokenRecord,
    make_frame,
)
from scheduler_proc.journal.recovery import RecoveredRequest, read_journal, restored
from scheduler_proc.journal.writer import FILE_NAME
from tests.unit.journal_runs import EOS, Run, make_header, release_journal

START = len(MAGIC) + 8
State = list[tuple[object, ...]]


def state_of(recovered: list[RecoveredRequest]) -> State:
    """Return all fields of recovered requests, after a check that they can be restored."""
    requests = [restored(request, EOS) for request in recovered]
    assert all(request.num_known_tokens == len(request.tokens) for request in requests)
    return [
        (request.seq, request.index, request.message, request.tokens.tolist(),
         msgspec.structs.astuple(request.logprobs), request.first_token_at, request.ended,
         request.acknowledged)
        for request in recovered
    ]  # fmt: skip


def written(directory: Path, num_rounds: int = 40) -> tuple[bytes, list[State]]:
    """Return a journal, and what could be read after each of its frames."""
    source, run = random.Random(3), Run(directory)
    live, states = [], [state_of(run.recovered())]
    for number in range(num_rounds):
        if source.random() < 0.3:
            live += run.accept(f"r{number}", source.choice([1, 1, 3]))
        for request in live:
            run.generate(request, *source.choices(range(3, 90), k=source.choice([1, 1, 2])))
            if source.random() < 0.3:
                block = LogprobBlock(pack_floats([-1.0]), 1, pack_ids([3]), pack_floats([-0.5]))
                run.add_logprobs(request, block)
        if live and source.random() < 0.2:
            run.finish(live.pop(), acknowledged=source.random() < 0.5)
        before = run.path.stat().st_size
        run.journal.commit()
        if run.path.stat().st_size > before:
            states.append(state_of(run.recovered()))
    release_journal(run.journal)
    return run.path.read_bytes(), states


Damage = Callable[[bytearray, random.Random, int], None]


def flip(data: bytearray, source: random.Random, _place: int) -> None:
    for _ in range(source.choice([1, 1, 1, 5, 50])):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def cut(data: bytearray, _source: random.Random, place: int) -> None:
    del data[place:]


def blank(data: bytearray, source: random.Random, place: int) -> None:
    end = min(place + source.choice([1, 16, 512, 4096]), len(data))
    data[place:end] = bytes([source.choice([0, 255])]) * (end - place)


def drop(data: bytearray, source: random.Random, place: int) -> None:
    del data[place : place + source.choice([1, 7, 512, 4096])]


def insert(data: bytearray, source: random.Random, place: int) -> None:
    data[place:place] = source.randbytes(source.choice([1, 9, 512]))


def repeat(data: bytearray, source: random.Random, place: int) -> None:
    data[place:place] = data[place : place + source.choice([100, 5000])]


def whole_frames(data: bytes) -> list[tuple[int, int]]:
    """Return where each frame begins and ends."""
    places, at = [], START
    while at < len(data):
        length, _ = FRAME_HEAD.unpack_from(data, at)
        places.append((at, at + FRAME_HEAD.size + length))
        at = places[-1][1]
    return places


def drop_frames(data: bytearray, source: random.Random, _place: int) -> None:
    begin, end = source.choice(whole_frames(bytes(data)))
    del data[begin:end]


def repeat_frames(data: bytearray, source: random.Random, _place: int) -> None:
    begin, end = source.choice(whole_frames(bytes(data)))
    data[end:end] = data[begin:end]


def swap_frames(data: bytearray, source: random.Random, _place: int) -> None:
    places = whole_frames(bytes(data))
    number = source.randrange(len(places) - 1)
    (begin, middle), (_, end) = places[number], places[number + 1]
    data[begin:end] = data[middle:end] + data[begin:middle]


@pytest.mark.parametrize(
    "damage", [flip, cut, blank, drop, insert, repeat, drop_frames, repeat_frames, swap_frames]
)
def test_a_damaged_journal_is_read_as_it_was_after_some_frame(
    tmp_path: Path, damage: Damage
) -> None:
    data, states = written(tmp_path)
    assert len(states) > 30
    nothing, path, source = states[0], tmp_path / FILE_NAME, random.Random(damage.__name__)
    num_rounds_read = set()
    for _ in range(100):
        damaged = bytearray(data)
        damage(damaged, source, source.randrange(len(data)))
        path.write_bytes(damaged)
        contents = read_journal(path)
        state = state_of(contents.requests)
        assert state in states
        if contents.header is None:
            assert state == nothing
        else:
            assert contents.header == make_header()
        if state != states[-1]:
            num_rounds_read.add(states.index(state))
            assert contents.num_unread_bytes or len(damaged) < len(data)
    assert len(num_rounds_read) > 5, "damage everywhere was tried"


@given(st.binary(max_size=300), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_journal_never_raise(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, has_start: bool, has_frame: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "random-journal"
    start = (MAGIC + bytes(8)) if has_start else b""
    frames, checksum = make_frame(encode(make_header()), 0)
    if has_frame:
        frames += make_frame(data, checksum)[0]
    path.write_bytes(start + frames + data)
    assert read_journal(path).requests == []


def test_a_damaged_length_takes_no_memory_beyond_the_file(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    for length in (1 << 31, (1 << 32) - 1, 1000):
        head = FRAME_HEAD.pack(length, zlib.crc32(b""))
        path.write_bytes(
            MAGIC + bytes(8) + make_frame(encode(make_header()), 0)[0] + head + b"x" * 99
        )
        tracemalloc.start()
        contents = read_journal(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (contents.requests, contents.num_unread_bytes) == ([], FRAME_HEAD.size + 99)
        assert peak < 1 << 20


def accepted(run: Run, **fields: Any) -> AcceptedRecord:
    (request,) = run.accept("x")
    submit = run.journal._kept[request.seq].message
    params = msgspec.structs.replace(submit.params, **fields.pop("params", {}))
    message = msgspec.structs.replace(submit, params=params, **fields)
    return AcceptedRecord.of(7, message, [0])


BLOCK = LogprobBlock(b"1234", 2, b"1234", b"1234")
INVALID_RECORDS: dict[str, Callable[[Run], JournalRecord]] = {
    "tokens of an unknown request": lambda _: JournalRecord(
        tokens=[TokenRecord([9], pack_ids([5]), 1.0)]
    ),
    "more tokens than requests": lambda _: JournalRecord(
        tokens=[TokenRecord([0], pack_ids([5, 6]), 1.0)]
    ),
    "half a token": lambda _: JournalRecord(tokens=[TokenRecord([0], b"\1\0\0", 1.0)]),
    "a token outside the vocabulary": lambda _: JournalRecord(
        tokens=[TokenRecord([0], pack_ids([100]), 1.0)]
    ),
    "a negative token": lambda _: JournalRecord(tokens=[TokenRecord([0], pack_ids([-1]), 1.0)]),
    "too many tokens": lambda _: JournalRecord(
        tokens=[TokenRecord([0] * 5000, pack_ids([5] * 5000), 1.0)]
    ),
    "tokens after the end": lambda _: JournalRecord(tokens=[TokenRecord([1], pack_ids([5]), 1.0)]),
    "a second end": lambda _: JournalRecord(ended=[Ended(1, "stop", None, None, 0, 0.0)]),
    "an end of an unknown request": lambda _: JournalRecord(
        ended=[Ended(9, "stop", None, None, 0, 0.0)]
    ),
    "logprobs of an unknown request": lambda _: JournalRecord(logprobs=[LogprobRecord(9)]),
    "half of the logprobs": lambda _: JournalRecord(logprobs=[LogprobRecord(0, [BLOCK])]),
    "a request twice": lambda run: JournalRecord([msgspec.structs.replace(accepted(run), seq=0)]),
    "a negative number": lambda run: JournalRecord(
        [msgspec.structs.replace(accepted(run), seq=-1)]
    ),
    "choice 1 of 1": lambda run: JournalRecord(
        [msgspec.structs.replace(accepted(run), indexes=[1])]
    ),
    "no max_new_tokens": lambda run: JournalRecord(
        [accepted(run, params={"max_new_tokens": None})]
    ),
    "no seed for choices": lambda run: JournalRecord(
        [accepted(run, params={"seed": None, "n": 2})]
    ),
    "half a prompt": lambda run: JournalRecord([accepted(run, prompt_ids=b"\1\0\0\0\1")]),
    "a prompt of other words": lambda run: JournalRecord(
        [accepted(run, prompt_ids=pack_ids([1000]))]
    ),
    "half a bad word": lambda run: JournalRecord([accepted(run, bad_words=[b"\1"])]),
    "a bias that is no id": lambda run: JournalRecord(
        [accepted(run, params={"logit_bias": {1 << 40: 1}})]
    ),
}


@pytest.mark.parametrize("what", INVALID_RECORDS)
def test_an_invalid_record_ends_the_reading_and_nothing_of_it_counts(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    (a, b) = run.accept("a") + run.accept("b")
    run.generate(a, 5)
    run.finish(b)
    run.journal.commit()
    before, size = state_of(run.recovered()), run.path.stat().st_size
    assert len(before) == 2
    invalid = INVALID_RECORDS[what](run)
    invalid.tokens.insert(0, TokenRecord([0], pack_ids([6]), 1.0))
    invalid.acknowledged.append(0)
    run.journal._file.append(encode(invalid))
    run.journal._file.append(encode(JournalRecord(tokens=[TokenRecord([0], pack_ids([7]), 1.0)])))
    caplog.clear()
    contents = read_journal(run.path)
    assert state_of(contents.requests) == before
    assert contents.num_unread_bytes == run.path.stat().st_size - size
    assert f"is damaged at byte {size}" in caplog.text
    release_journal(run.journal)


def test_valid_records_are_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.journal._file.append(
        encode(JournalRecord([accepted(run)], [TokenRecord([7], pack_ids([5]), 1.0)]))
    )
    contents = read_journal(run.path)
    assert (len(contents.requests), contents.num_unread_bytes) == (1, 0)
    release_journal(run.journal)


def test_a_file_that_cannot_be_read_further_is_damaged_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.accept("a")
    run.journal.commit()
    size = run.path.stat().st_size
    monkeypatch.setattr("scheduler_proc.journal.file.os.fstat", lambda fd: Grown(size + 9))
    contents = read_journal(run.path)
    assert (len(contents.requests), contents.num_unread_bytes) == (1, 9)
    release_journal(run.journal)


class Grown:
    """A file that is said to be larger than what can be read of it."""

    def __init__(self, size: int) -> None:
        self.st_size, self.st_mode = size, stat.S_IFREG


def test_an_own_file_is_read_with_any_number_of_frames(tmp_path: Path) -> None:
    file = JournalFile(tmp_path / FILE_NAME, make_header(), durable=False)
    file.rewrite([])
    assert read_journal(file.path).header == make_header()
    assert file.size == file.path.stat().st_size
    file.release()
