"""The detokenizer's core: chunks, usage and the one end of every request."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from detok_proc.detokenizer import Detokenizer
from quadriga.wire.client import Chunk, ErrorInfo, StageTimes, Usage
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.to_detok import StepOutput, StreamEnd, StreamReplay, StreamStart
from quadriga.wire.to_scheduler import CLIENT_LOST
from tests.unit.detok.steps import (
    ALICE,
    BOB,
    EOS,
    NOW,
    closing,
    detokenizer,
    end_of,
    ids,
    only_chunk,
    opening,
    play,
    step,
)
from tests.unit.tiny_vocabulary import TOKENIZER


def text_run(text: str, close: StreamEnd, **options: Any) -> list[StepOutput]:
    """Return the steps of a request with one token each, and its end in a step of its own."""
    tokens = ids(text)
    steps = [step([opening(**options)], [(1, tokens[0])])]
    steps += [step(tokens=[(1, token_id)]) for token_id in tokens[1:]]
    return [*steps, step(closed=[close])]


def test_a_stream_sends_each_token_and_then_its_end() -> None:
    chunks, _ = play(detokenizer(), text_run("hey", closing()))
    assert [chunk.text for chunk in chunks] == ["h", "e", "y", ""]
    assert [chunk.text_offset for chunk in chunks] == [0, 1, 2, 3]
    assert [chunk.end is None for chunk in chunks] == [True, True, True, False]
    end = end_of(chunks[-1])
    assert end.finish_reason == "length"
    assert end.usage == Usage(7, 3, 3)
    assert end.times == StageTimes(1.0, 2.0, 3.0, 4.0, NOW)


def test_a_request_without_stream_gets_one_chunk_with_everything() -> None:
    steps = [
        step([opening(stream=False)], [(1, ids("a")[0])], time=5.0),
        step(tokens=[(1, ids("b")[0])], time=6.0),
        step(closed=[closing()]),
    ]
    chunks, _ = play(detokenizer(), steps)
    (chunk,) = chunks
    assert chunk.text == "ab"
    assert list(unpack_ids(chunk.token_ids)) == ids("ab")
    assert chunk.token_times == [5.0, 6.0]


def test_the_interval_holds_back_all_but_the_first_piece() -> None:
    chunks, _ = play(detokenizer(interval=3), text_run("abcdefgh", closing()))
    assert [chunk.text for chunk in chunks] == ["a", "bcd", "efg", "h"]


def test_a_token_without_text_is_sent_for_its_id_and_time() -> None:
    half, rest = ids("é")
    chunks, _ = play(detokenizer(), [step([opening()], [(1, half)]), step(tokens=[(1, rest)])])
    assert [(chunk.text, chunk.text_offset) for chunk in chunks] == [("", 0), ("é", 0)]
    assert [list(unpack_ids(chunk.token_ids)) for chunk in chunks] == [[half], [rest]]


def test_a_token_and_the_end_in_one_step_are_one_chunk() -> None:
    core = detokenizer()
    deliveries = core.process(step([opening()], [(1, ids("x")[0])], [closing()]))
    chunk = only_chunk(deliveries)
    assert (chunk.text, end_of(chunk).usage.completion_tokens) == ("x", 1)
    assert core.num_open == 0


def test_half_a_character_is_flushed_at_the_end() -> None:
    chunks, _ = play(
        detokenizer(), [step([opening()], [(1, ids("é")[0])]), step(closed=[closing()])]
    )
    assert "".join(chunk.text for chunk in chunks) == "\ufffd"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_never_opened_gets_exactly_one_end(reason: str) -> None:
    error = ErrorInfo("failed", "why") if reason == "error" else None
    deliveries = detokenizer().process(step(closed=[closing(9, reason=reason, error=error)]))
    chunk = only_chunk(deliveries)
    assert (chunk.request_id, chunk.text, chunk.token_ids) == ("r9", "", b"")
    assert (end_of(chunk).finish_reason, end_of(chunk).error) == (reason, error)
    assert end_of(chunk).usage == Usage(7, 0, 3)


def test_a_lost_client_gets_no_end() -> None:
    core, lost = detokenizer(), ErrorInfo(CLIENT_LOST, "why")
    core.process(step([opening()], [(1, ids("x")[0])]))
    deliveries = core.process(step(closed=[closing(reason="abort", error=lost)]))
    assert deliveries.by_client == {}
    assert [(c.request_id, end_of(c).usage) for c in deliveries.lost[ALICE]] == [
        ("r1", Usage(7, 1, 3))
    ]
    assert (deliveries.ended, core.num_open) == ({1: 0}, 0)


def test_each_client_gets_its_own_chunks_in_one_list() -> None:
    tokens = [(seq, ids("x")[0]) for seq in (1, 2, 3)]
    opened = [opening(1), opening(2, BOB), opening(3)]
    deliveries = detokenizer().process(step(opened, tokens))
    assert [c.request_id for c in deliveries.by_client[ALICE]] == ["r1", "r3"]
    assert [c.request_id for c in deliveries.by_client[BOB]] == ["r2"]


def test_tokens_after_the_end_are_dropped() -> None:
    core = detokenizer()
    play(core, text_run("a", closing()))
    assert core.process(step(tokens=[(1, ids("b")[0])])).by_client == {}


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reason", ["length", "stop", "abort"])
def test_a_stop_string_cuts_the_text_and_explains_the_end(stream: bool, reason: str) -> None:
    core = detokenizer()
    steps = text_run("one END two", closing(reason=reason), stream=stream, stops=["END"])
    chunks, stops = play(core, steps)
    assert "".join(chunk.text for chunk in chunks) == "one "
    assert stops == [1]
    end = end_of(chunks[-1])
    assert (end.finish_reason, end.matched_stop) == ("stop", "END")
    assert end.usage.completion_tokens == len("one END")
    sent = [i for chunk in chunks for i in unpack_ids(chunk.token_ids)]
    assert sent == ids("one END"), "the token that completed the stop string is the last"
    assert core.num_open == 0


def test_an_error_wins_over_a_stop_string() -> None:
    error = ErrorInfo("server_failed", "the worker died")
    steps = text_run("a.", closing(reason="error", error=error), stops=["."])
    chunks, _ = play(detokenizer(), steps)
    end = end_of(chunks[-1])
    assert (end.finish_reason, end.error, end.matched_stop) == ("error", error, None)


def test_a_beginning_of_a_stop_string_is_held_back_and_flushed() -> None:
    chunks, stops = play(detokenizer(), text_run("go EN", closing(), stops=["END"]))
    assert [chunk.text for chunk in chunks] == ["g", "o", " ", "", "", "EN"]
    assert stops == []


def choice(index: int, regexes: list[str], text: str) -> tuple[StepOutput, StreamReplay]:
    """Return a choice of request "r" that ends at its length: in one step, and as a replay."""
    start = StreamStart(index, ALICE, "r", True, True, [], index, regexes)
    end = StreamEnd(index, ALICE, "r", "length", None, None, 1, 0, 1.0, 2.0, 3.0, 4.0, index)
    whole = StepOutput(9.0, [start], [index] * len(text), pack_ids(ids(text)), [end])
    return whole, StreamReplay(start, whole.token_ids, [], end)


def test_the_replay_of_a_choice_is_not_charged_with_the_slow_search_of_another_one() -> None:
    core = detokenizer()
    slow, ordinary = choice(0, ["(a+)+$b"], "a" * 200), choice(1, ["xy+z"], "a" * 200)
    core.process(StepOutput(1.0, [ordinary[1].opening], [], b"", []))  # keeps the budget
    chunks, _ = play(core, [slow[0]])
    error = end_of(chunks[-1]).error
    assert error is not None
    assert error.field == "stop_regex"
    assert "".join(chunk.text for chunk in chunks) == "", "what was not searched is not sent"
    deliveries = core.process(StepOutput(9.0, [], [], b"", [], replayed=[ordinary[1]]))
    (chunk,) = deliveries.replays[ALICE]
    assert (chunk.text, end_of(chunk).finish_reason) == ("a" * 200, "length")


# --- stop tokens ----------------------------------------------------------------------------------


def run_to_stop_token(token_id: int, skip: bool = True) -> list[Chunk]:
    close = closing(reason="stop", matched=token_id)
    steps = [
        step([opening(skip=skip)], [(1, ids("x")[0])]),
        step(tokens=[(1, token_id)], closed=[close]),
    ]
    chunks, _ = play(detokenizer(), steps)
    return chunks


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("token_id", [EOS, ids("x")[0]])
def test_a_stop_token_counts_and_leaves_no_text(token_id: int, skip: bool) -> None:
    chunks = run_to_stop_token(token_id, skip)
    assert "".join(chunk.text for chunk in chunks) == "x"
    assert list(unpack_ids(chunks[-1].token_ids)) == [token_id]
    assert end_of(chunks[-1]).usage.completion_tokens == 2
    assert (end_of(chunks[-1]).finish_reason, end_of(chunks[-1]).matched_stop) == ("stop", token_id)


def test_special_tokens_leave_text_only_if_asked() -> None:
    for skip, expected in ((True, "ab"), (False, "a<eos>b")):
        chunks, _ = play(detokenizer(), text_run("a<eos>b", closing(), skip=skip))
        assert "".join(chunk.text for chunk in chunks) == expected


# --- everything together --------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, EOS + 3), min_size=1, max_size=40),
    stops=st.lists(st.text("ab \ufffd", min_size=1, max_size=3), max_size=2),
    interval=st.integers(1, 5),
    stream=st.booleans(),
)
def test_the_chunks_joined_are_the_whole_text_up_to_its_stop(
    tokens: list[int], stops: list[str], interval: int, stream: bool
) -> None:
    steps = [step([opening(stream=stream, stops=stops)], [(1, tokens[0])])]
    steps += [step(tokens=[(1, token_id)]) for token_id in tokens[1:]]
    chunks, found = play(detokenizer(interval), [*steps, step(closed=[closing()])])
    whole = TOKENIZER.decode(tokens)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    matches = [stop for stop in stops if ends and whole[: min(ends)].endswith(stop)]
    cut = min(ends) - max(map(len, matches)) if ends else len(whole)
    assert "".join(chunk.text for chunk in chunks) == whole[:cut]
    offset = 0
    for chunk in chunks:
        assert chunk.text_offset == offset
        offset += len(chunk.text)
    sent = [i for chunk in chunks for i in unpack_ids(chunk.token_ids)]
    assert sent == tokens[: len(sent)]
    assert len(sent) == end_of(chunks[-1]).usage.completion_tokens
    assert [chunk.end is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(found) <= 1 and (stream or len(chunks) == 1)


def replay(text: str, close: StreamEnd | None = None, **options: Any) -> StreamReplay:
    return StreamReplay(opening(**options), pack_ids(ids(text)), [], close)


def test_a_detokenizer_that_replays_a_text_goes_on_as_the_one_before_it() -> None:
    for cut in range(1, 6):
        steps = text_run("häßlich", closing(), stops=["ich"])
        tokens = [output.token_ids for output in steps[:cut]]
        whole = StreamReplay(opening(stops=["ich"]), b"".join(tokens), [], None)
        core = detokenizer()
        first = core.process(StepOutput(9.0, [], [], b"", [], replayed=[whole]))
        (again,) = first.replays[ALICE]
        assert again.text_offset == 0
        assert again.token_times == [9.0] * cut
        chunks, stops = play(core, steps[cut:])
        texts = [again.text, *(chunk.text for chunk in chunks)]
        assert "".join(texts) == "häßl"
        assert first.stop_found + stops == [1]
        assert chunks[0].text_offset == len(again.text)
        assert end_of(chunks[-1]).matched_stop == "ich"


def test_a_text_that_has_ended_is_replayed_with_its_end() -> None:
    core = detokenizer()
    tokens = pack_ids([*ids("hey"), EOS])
    close = closing(reason="stop", matched=EOS)
    again = StreamReplay(opening(skip=False), tokens, [], close)
    deliveries = core.process(StepOutput(9.0, [], [], b"", [], replayed=[again]))
    (chunk,) = deliveries.replays[ALICE]
    assert (chunk.text, end_of(chunk).finish_reason, end_of(chunk).matched_stop) == (
        "hey",
        "stop",
        EOS,
    )
    assert deliveries.ended == {1: 0}
    assert core.num_open == 0


def test_a_replay_of_a_part_only_confirms_a_request_without_stream() -> None:
    core = detokenizer()
    deliveries = core.process(
        StepOutput(9.0, [], [], b"", [], replayed=[replay("he", stream=False)])
    )
    assert [(c.text, c.token_ids) for c in deliveries.replays[ALICE]] == [("", b"")]
    chunks, _ = play(core, [step(tokens=[(1, ids("y")[0])]), step(closed=[closing()])])
    assert [chunk.text for chunk in chunks] == ["hey"]


def pieces_of(chunks: Sequence[Chunk]) -> list[str]:
    """Return the text of each token, and that of the end."""
    pieces: list[str] = []
    for chunk in chunks:
        lengths = getattr(chunk, "text_lengths", None)
        if lengths is None:
            assert len(chunk.token_ids) == 4
            assert chunk.end is None
            lengths = [len(chunk.text)]
        assert len(lengths) == len(unpack_ids(chunk.token_ids))
        position = 0
        for length in lengths:
            pieces.append(chunk.text[position : position + length])
            position += length
        if chunk.end is not None:
            pieces.append(chunk.text[position:])
    return pieces


# --- texts that continue a prompt -----------------------------------------------------------------


def sentencepiece(prompt: str) -> tuple[Tokenizer, bytes]:
    """Return a tokenizer whose decoder strips the first space, and the ids of a prompt."""
    words = ["<s>", "▁the", "▁end", "▁▁", "▁is", ".", "▁is▁here"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "."))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer, pack_ids(words.index(word) for word in prompt.split())


THE, END, GAP, IS = 1, 2, 3, 4


def continued(prompt: str, tokens: list[int], **fields: Any) -> list[Chunk]:
    """Return the chunks of an answer behind a prompt, one for each token and one for its end."""
    tokenizer, prompt_end = sentencepiece(prompt)
    start = msgspec.structs.replace(opening(), prompt_end=prompt_end, **fields)
    core = Detokenizer(tokenizer, 1, clock=lambda: NOW)
    steps = [step([start], [(1, tokens[0])]), *(step(tokens=[(1, i)]) for i in tokens[1:])]
    chunks, _ = play(core, [*steps, step(closed=[closing()])])
    replayed = StreamReplay(start, pack_ids(tokens), [], closing())
    again = core.process(StepOutput(5.0, [], [], b"", [], replayed=[replayed])).replays[ALICE]
    assert "".join(c.text for c in again) == "".join(c.text for c in chunks)
    return chunks


def test_a_text_that_continues_a_prompt_keeps_its_first_space_also_in_a_replay() -> None:
    assert [c.text for c in continued("<s> ▁the", [END, IS])] == [" end", " is", ""]
    assert [c.text for c in continued("<s> ▁the", [GAP, IS])] == ["  ", " is", ""]
    assert [c.text for c in continued("", [END, IS])] == ["end", " is", ""]
    assert [c.text for c in continued("<s>", [END, IS])] == ["end", " is", ""]


@pytest.mark.parametrize("fields", [{"stop_strings": [" is"]}, {"stop_regexes": [r"^ i\w| is"]}])
def test_a_stop_that_begins_with_a_space_ends_a_text_at_its_first_token(
    fields: dict[str, Any],
) -> None:
    chunks = continued("▁the", [IS, END], **fields)
    assert "".join(chunk.text for chunk in chunks) == ""
    assert end_of(chunks[-1]).finish_reason == "stop"
    kept = continued("▁the", [IS, END], keeps_stop=True, **fields)
    assert "".join(chunk.text for chunk in kept) in (" is", " i")


def test_the_text_lengths_of_a_text_that_continues_a_prompt_count_its_first_space() -> None:
    chunks = continued("▁the", [END, IS], text_lengths=True)
    assert pieces_of(chunks) == [" end", " is", ""]


@pytest.mark.parametrize("stops", [(), ("lo w",), ("zz",)])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("num_before", range(14))
def test_text_lengths_cut_a_replay_where_its_chunks_were(
    stops: tuple[str, ...], interval: int, num_before: int
) -> None:
    """The text has characters of several tokens, and its end may begin a stop string."""
    start = msgspec.structs.replace(opening(stops=stops), text_lengths=True)
    tokens = ids("hällo w€z")
    steps = [step([start], [(1, tokens[0])])]
    steps += [step(tokens=[(1, token_id)]) for token_id in tokens[1:]]
    plain, _ = play(detokenizer(), [*steps, step(closed=[closing()])])
    core = detokenizer(interval)
    play(core, steps[:num_before])
    replay = StreamReplay(start, pack_ids(tokens[:num_before]), [], None)
    begin = StepOutput(5.0, [], [], b"", [], replayed=[replay] if num_before else [])
    (again,) = core.process(begin).replays.get(ALICE, [None])
    rest, _ = play(core, [*steps[num_before:], step(closed=[closing()])])
    assert pieces_of([*([again] if again else []), *rest]) == pieces_of(plain)
    whole = StreamReplay(start, pack_ids(tokens), [], closing())
    only = core.process(StepOutput(5.0, [], [], b"", [], replayed=[whole])).replays[ALICE]
    assert pieces_of(only) == pieces_of(plain)
    assert "".join(pieces_of(plain)) == ("häl" if stops == ("lo w",) else "hällo w€z")


# --- work in slices -------------------------------------------------------------------------------


def long_replay(
    seq: int, client: bytes, num_tokens: int, regexes: Sequence[str] = (), ends: bool = False
) -> StreamReplay:
    start = StreamStart(seq, client, f"r{seq}", True, True, [], stop_regexes=list(regexes))
    end = closing(seq, client) if ends else None
    return StreamReplay(start, pack_ids(ids("x") * num_tokens), [], end)


def in_small_slices() -> Detokenizer:
    return Detokenizer(TOKENIZER, 1, clock=lambda: NOW, slice_s=0.0)


@pytest.mark.parametrize("regexes", [[], ["~{1,9}Q"]])
def test_the_replay_of_one_request_delays_no_token_of_another(regexes: list[str]) -> None:
    core = in_small_slices()
    replays = [long_replay(seq, ALICE, 2000, regexes) for seq in range(10, 14)]
    first = step([opening(client=BOB)], [(1, ids("b")[0])])
    deliveries = core.process(msgspec.structs.replace(first, replayed=replays))
    assert only_chunk(deliveries, BOB).text == "b"
    assert deliveries.replays == {}
    texts, num_steps = [], 0
    while core.has_work:
        num_steps += 1
        deliveries = core.process(step(tokens=[(1, ids("b")[0]), (10, ids("y")[0])]))
        assert [chunk.text for chunk in deliveries.by_client[BOB]] == ["b"]
        texts += [chunk.text for chunk in deliveries.replays.get(ALICE, [])]
        if num_steps > 20_000:
            break
        if len(texts) == 4:
            break
    assert num_steps >= 4 * 2000 / 16 if not regexes else num_steps >= 4 * 2000
    assert sorted(text.rstrip("y") for text in texts) == ["x" * 2000] * 4


def test_a_short_replay_does_not_wait_for_a_long_one() -> None:
    core = in_small_slices()
    replays = [long_replay(1, ALICE, 5000), long_replay(2, BOB, 40)]
    core.process(StepOutput(5.0, [], [], b"", [], replayed=replays))
    arrived = []
    while core.has_work:
        arrived += list(core.work().replays)
    assert arrived == [BOB, ALICE]


def test_a_request_that_ends_while_it_is_replayed_ends_once_with_all_of_its_text() -> None:
    core = in_small_slices()
    core.process(StepOutput(5.0, [], [], b"", [], replayed=[long_replay(1, ALICE, 500)]))
    sent = [core.process(step(tokens=[(1, ids("y")[0])])), core.process(step(closed=[closing(1)]))]
    assert core.has_ends
    while core.has_work:
        sent.append(core.work())
    chunks = [c for one in sent for by in (one.replays, one.by_client) for c in by.get(ALICE, [])]
    assert "".join(chunk.text for chunk in chunks) == "x" * 500 + "y"
    assert [chunk.end is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [seq for one in sent for seq in one.ended] == [1]
    assert core.num_open == 0


def test_an_end_that_a_replay_overtakes_is_acknowledged_with_the_end_of_the_replay() -> None:
    core = in_small_slices()
    for placement in (1, 2):
        replay = long_replay(1, ALICE, 500)
        end = msgspec.structs.replace(closing(), placement=placement)
        replay = msgspec.structs.replace(replay, closing=end)
        core.process(StepOutput(5.0, [], [], b"", [], replayed=[replay]))
    ended: list[tuple[int, int]] = []
    while core.has_work:
        ended += core.work().ended.items()
    assert ended == [(1, 2)]


def test_a_replay_of_no_token_that_waits_for_its_turn_is_sent_with_the_first_token() -> None:
    core = in_small_slices()
    replays = [long_replay(seq, ALICE, 0) for seq in (1, 2)]
    first = core.process(msgspec.structs.replace(step(), replayed=replays))
    assert [chunk.request_id for chunk in first.replays[ALICE]] == ["r1"]
    token = ids("b")[0]
    second = core.process(step([opening(1), opening(2)], [(1, token), (2, token)]))
    assert [(chunk.request_id, chunk.text) for chunk in second.replays[ALICE]] == [("r2", "b")]
    assert [chunk.request_id for chunk in second.by_client[ALICE]] == ["r1"]
