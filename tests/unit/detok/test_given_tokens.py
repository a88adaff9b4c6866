"""Texts that begin with tokens that no step has sampled: those of forks."""

import math
from typing import Any

import msgspec
import pytest

from quadriga.wire.client import Chunk
from quadriga.wire.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.packing import pack_floats, pack_ids, unpack_floats, unpack_ids
from quadriga.wire.to_detok import StepOutput, StreamReplay, StreamStart
from tests.unit.detok.steps import closing, detokenizer, end_of, ids, opening, play, step

TEXT = "a größe 日本 ½"


def given(count: int, token_ids: list[int], **options: Any) -> StreamStart:
    start = opening(**options)
    return msgspec.structs.replace(start, given_ids=pack_ids(token_ids[:count]))


def steps_from(count: int, token_ids: list[int], **options: Any) -> list[StepOutput]:
    """Return the steps of an answer whose first tokens are given."""
    first = step([given(count, token_ids, **options)], [(1, token_ids[count])])
    others = [step(tokens=[(1, token_id)]) for token_id in token_ids[count + 1 :]]
    return [first, *others, step(closed=[closing()])]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("count", range(len(ids(TEXT))))
def test_the_text_is_that_of_all_tokens_wherever_it_is_cut(count: int) -> None:
    chunks, stops = play(detokenizer(), steps_from(count, ids(TEXT)))
    assert text_of(chunks) == TEXT and not stops
    assert end_of(chunks[-1]).usage.completion_tokens == len(ids(TEXT))
    tokens = [token for chunk in chunks for token in unpack_ids(chunk.token_ids)]
    assert tokens == ids(TEXT)
    times = [time for chunk in chunks for time in chunk.token_times]
    assert times == [0.0] * count + [5.0] * (len(tokens) - count)
    offset = 0
    for chunk in chunks:
        assert chunk.text_offset == offset
        offset += len(chunk.text)


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 150])
def test_many_given_tokens_have_their_lengths(count: int) -> None:
    token_ids = ids(TEXT * 9)
    start = msgspec.structs.replace(given(count, token_ids), text_lengths=True)
    output = StepOutput(5.0, [start], [1], pack_ids(token_ids[count : count + 1]), [])
    (chunk,), _ = play(detokenizer(), [output])
    plain = [step([msgspec.structs.replace(start, given_ids=b"")], [(1, token_ids[0])])]
    plain += [step(tokens=[(1, token_id)]) for token_id in token_ids[1 : count + 1]]
    chunks, _ = play(detokenizer(), plain)
    assert chunk.text == text_of(chunks)
    assert chunk.text_lengths == [len(each.text) for each in chunks]


@pytest.mark.parametrize("count", range(10))
def test_a_stop_string_ends_the_text_wherever_it_is_cut(count: int) -> None:
    chunks, stops = play(detokenizer(), steps_from(count, ids("one two three"), stops=["two"]))
    assert text_of(chunks) == "one "
    assert stops == [1]
    assert end_of(chunks[-1]).matched_stop == "two"


def test_given_tokens_come_at_once_with_the_first_sampled_one() -> None:
    chunks, _ = play(detokenizer(), steps_from(3, ids("abcdef")))
    assert [chunk.text for chunk in chunks] == ["abcd", "e", "f", ""]


def test_one_that_is_not_streamed_has_all_in_its_last_chunk() -> None:
    (chunk,), _ = play(detokenizer(), steps_from(3, ids("abcdef"), stream=False))
    assert chunk.text == "abcdef"


def test_one_that_ends_with_its_first_sampled_token_has_both() -> None:
    output = step([given(2, ids("abc"))], [(1, ids("c")[0])], [closing()])
    (chunk,), _ = play(detokenizer(), [output])
    assert (chunk.text, end_of(chunk).usage.completion_tokens) == ("abc", 3)


def test_a_replay_has_the_same_times_and_lengths() -> None:
    token_ids = ids(TEXT)
    start = msgspec.structs.replace(given(4, token_ids), text_lengths=True)
    output = StepOutput(5.0, [start], [1], pack_ids(token_ids[4:5]), [])
    (first,), _ = play(detokenizer(), [output])
    replay = StreamReplay(start, pack_ids(token_ids[:5]), [], None)
    core = detokenizer()
    deliveries = core.process(StepOutput(5.0, [], [], b"", [], replayed=[replay]))
    (again,) = deliveries.replays[b"alice"]
    assert again == first


def test_given_tokens_have_no_logprobs() -> None:
    token_ids = ids("abcd")
    block = LogprobBlock(pack_floats([-1.5]), 1, pack_ids([7]), pack_floats([-0.5]))
    start = msgspec.structs.replace(given(3, token_ids), logprobs=1)
    logprobs = SampledLogprobs(pack_ids([0]), block)
    output = StepOutput(5.0, [start], [1], pack_ids(token_ids[3:]), [], logprobs)
    (chunk,), _ = play(detokenizer(), [output])
    replay = StreamReplay(start, pack_ids(token_ids), [block], None)
    deliveries = detokenizer().process(StepOutput(5.0, [], [], b"", [], replayed=[replay]))
    for each in (chunk, *deliveries.replays[b"alice"]):
        assert each.logprobs is not None
        values = unpack_floats(each.logprobs.values).tolist()
        assert all(map(math.isnan, values[:3])) and values[3:] == [-1.5]
        assert unpack_ids(each.logprobs.top_ids).tolist() == [-1, -1, -1, 7]
