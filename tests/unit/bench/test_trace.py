"""Traces: prompt tokens, files, and the generator."""

import itertools
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.synthetic import Lengths, TraceSpec, generate
from quadriga.errors import ConfigError
from simulator.trace import TraceRequest, prompt_ids, read_trace
from simulator.trace import write_trace as write

FIXED = Lengths(8, 8)


def spec(**changes: Any) -> TraceSpec:
    return TraceSpec(**{"num_requests": 12, "output_len": FIXED, "input_len": FIXED, **changes})


def ids_of(*segments: tuple[int, int], seed: int | str = 0) -> list[int]:
    return prompt_ids(TraceRequest(0.0, segments, 1), 500, seed).tolist()


# --- prompts ---


def test_a_prompt_is_the_concatenation_of_its_segments() -> None:
    assert ids_of((1, 5), (2, 3)) == ids_of((1, 5)) + ids_of((2, 3))
    assert len(ids_of((1, 5), (2, 3))) == 8


def test_a_segment_is_the_same_tokens_wherever_it_occurs_and_another_is_not() -> None:
    assert ids_of((7, 40)) == ids_of((7, 40))
    assert ids_of((7, 40))[:16] == ids_of((7, 16))
    assert ids_of((7, 40)) != ids_of((8, 40))
    assert ids_of((7, 40)) != ids_of((7, 40), seed=1)
    assert ids_of((7, 40), seed="0/1") != ids_of((7, 40))


@given(st.integers(4, 2000), st.integers(0, 99), st.integers(1, 50))
def test_ids_are_of_the_vocabulary_and_no_special_ones(vocab: int, seed: int, tokens: int) -> None:
    ids = prompt_ids(TraceRequest(0.0, ((1, tokens),), 1), vocab, seed)
    assert all(3 <= token < vocab for token in ids)


def test_literal_ids_are_the_prompt() -> None:
    assert prompt_ids(TraceRequest(0.0, (), 1, ids=(0, 9, 4)), 500, 0).tolist() == [0, 9, 4]


# --- files ---

COUNTS = st.integers(1, 2**31)
INDICES = st.integers(0, 2**31)
OWN_TOKENS = st.one_of(
    st.fixed_dictionaries(
        {"segments": st.lists(st.tuples(INDICES, COUNTS), min_size=1).map(tuple)}
    ),
    st.fixed_dictionaries(
        {"segments": st.just(()), "ids": st.lists(INDICES, min_size=1).map(tuple)}
    ),
)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    return [
        TraceRequest(
            at=draw(st.floats(0, 1e9)),
            max_new_tokens=draw(COUNTS),
            client=draw(INDICES),
            priority=draw(st.integers(-1000, 1000)),
            follows=draw(st.none() | st.integers(0, index - 1)) if index else None,
            continues=draw(st.booleans()),
            **draw(OWN_TOKENS),
        )
        for index in range(draw(st.integers(1, 5)))
    ]


@given(traces())
def test_a_written_trace_is_read_unchanged(
    tmp_path_factory: pytest.TempPathFactory, trace: list[TraceRequest]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write(path, trace)
    assert read_trace(path) == trace


def test_a_line_has_only_what_is_not_the_default(tmp_path: Path) -> None:
    write(tmp_path / "t", [TraceRequest(0.5, ((3, 64),), 16)])
    assert (tmp_path / "t").read_text() == '{"at":0.5,"segments":[[3,64]],"max_new_tokens":16}\n'


GOOD = '{"at": 0, "segments": [[1, 4]], "max_new_tokens": 2}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "malformed"),
        ('{"segments": [[1, 4]], "max_new_tokens": 2}', "missing required field `at`"),
        (GOOD.replace("}", ', "colour": 3}'), "unknown field `colour`"),
        (GOOD.replace("2}", '"two"}'), r"`\$.max_new_tokens`"),
        (GOOD.replace("2}", "0}"), r"`int` >= 1 - at `\$.max_new_tokens`"),
        (GOOD.replace('"at": 0', '"at": -1'), r"`\$.at`"),
        (GOOD.replace("[1, 4]", "[1, 4, 5]"), r"`\$.segments\[0\]`"),
        (GOOD.replace("[1, 4]", "[1, 0]"), r"`\$.segments\[0\]\[1\]`"),
        (GOOD.replace("}", ', "priority": 2000}'), r"`\$.priority`"),
        (GOOD.replace("}", ', "follows": 1}'), "`follows` is 1: it must name an earlier request"),
        (GOOD.replace("}", ', "ids": [3]}'), "`ids` stand in place of `segments`"),
        (GOOD.replace("[1, 4]", ""), "`segments` is empty"),
        ("", "malformed|truncated"),
    ],
)
def test_errors_of_a_trace_name_file_line_and_field(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}{line.rstrip()}\n")
    with pytest.raises(ConfigError, match=rf"t\.jsonl, line 2: .*({message})"):
        read_trace(path)


def test_a_turn_may_add_no_tokens_of_its_own(tmp_path: Path) -> None:
    trace = [TraceRequest(0.0, ((1, 4),), 2), TraceRequest(0.0, (), 2, follows=0)]
    write(tmp_path / "t", trace)
    assert read_trace(tmp_path / "t") == trace


def test_a_file_that_is_not_there_or_has_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="empty has no requests"):
        read_trace(tmp_path / "empty")


# --- lengths ---


def test_lengths_are_read_from_their_short_form() -> None:
    assert Lengths.parse("64") == Lengths(64, 64)
    assert Lengths.parse("16:256") == Lengths(16, 256)
    assert Lengths.parse("lognormal:200:0.8:4:2048") == Lengths(4, 2048, 200.0, 0.8)
    assert Lengths.parse("lognormal:200:0.8").low == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("many", "output is 'many': it must be N, LOW:HIGH"),
        ("1:2:3", "it must be N"),
        ("lognormal:5", "it must be N"),
        ("lognormal:5:1:2", "it must be N"),
        ("0", r"output must be positive \(it is 0\)"),
        ("-1", "output must be positive"),
        ("lognormal:0:1", "output must be positive"),
        ("lognormal:nan:1", "output must be positive"),
        ("9:3", "9 is more than 3"),
        ("lognormal:5:-1", "sigma 0 or more"),
        ("lognormal:inf:1", "must be finite"),
        ("lognormal:5:nan", "must be finite"),
    ],
)
def test_lengths_that_cannot_work_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lengths.parse(text, "output")


@given(st.integers(1, 500), st.integers(0, 500), st.floats(1, 1e6), st.floats(0, 20))
def test_drawn_lengths_stay_in_their_range(low: int, more: int, mean: float, sigma: float) -> None:
    for lengths in (Lengths(low, low + more), Lengths(low, low + more, mean, sigma)):
        assert low <= lengths.draw(random.Random(0)) <= low + more


def test_the_mean_of_a_lognormal_is_the_one_that_was_asked_for() -> None:
    source, lengths = random.Random(0), Lengths.parse("lognormal:200:0.8")
    assert statistics.fmean(lengths.draw(source) for _ in range(20_000)) == pytest.approx(200, 0.03)
    assert Lengths.parse("lognormal:200:0").draw(source) == 200


# --- generator ---


@given(
    st.builds(
        spec,
        num_requests=st.integers(1, 40),
        input_len=st.none() | st.just(Lengths(1, 9)),
        output_len=st.just(Lengths(1, 9, 4.0, 1.0)),
        request_rate=st.sampled_from([0.5, 10.0, math.inf]),
        burstiness=st.sampled_from([0.3, 1.0, math.inf]),
        turns=st.integers(1, 4),
        think_time=st.sampled_from([0.0, 1.5]),
        num_clients=st.integers(1, 3),
        seed=st.integers(0, 9),
    ),
    st.none() | st.integers(1, 5),
)
def test_a_trace_is_deterministic_sorted_and_valid(
    given_spec: TraceSpec, lanes: int | None
) -> None:
    changes = {} if lanes is None else {"max_concurrency": lanes, "request_rate": math.inf}
    used = spec(**{f: getattr(given_spec, f) for f in TraceSpec.__slots__} | changes)
    trace = list(generate(used))
    assert trace == list(generate(used))
    assert len(trace) == used.num_requests
    roots = [request.at for request in trace if request.follows is None]
    assert roots == sorted(roots) and roots[0] == 0.0
    for index, request in enumerate(trace):
        assert request.follows is None or request.follows < index
        assert 0 <= request.client < used.num_clients
        assert len(request.segments) == (used.input_len is not None)


def test_all_arrive_at_once_unless_there_is_a_rate() -> None:
    assert {request.at for request in generate(spec())} == {0.0}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(
    burstiness: float,
) -> None:
    trace = generate(spec(num_requests=20_000, request_rate=50.0, burstiness=burstiness))
    gaps = [after.at - before.at for before, after in itertools.pairwise(trace)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.1)


def test_without_any_burstiness_they_come_like_a_clock() -> None:
    trace = generate(spec(num_requests=4, request_rate=50.0, burstiness=math.inf))
    assert [request.at for request in trace] == pytest.approx([0, 0.02, 0.04, 0.06])


def test_in_a_closed_loop_the_next_of_a_lane_follows_the_one_before() -> None:
    trace = list(generate(spec(num_requests=7, max_concurrency=3, think_time=0.5)))
    assert [request.follows for request in trace] == [None, None, None, 0, 1, 2, 3]
    assert [request.at for request in trace] == [0.0] * 3 + [0.5] * 4
    assert all(request.predecessor is None for request in trace)


def test_the_turns_of_a_chat_continue_one_another() -> None:
    trace = list(generate(spec(num_requests=5, turns=2, think_time=2.0, num_clients=2)))
    assert [request.predecessor for request in trace] == [None, 0, None, 2, None]
    assert [request.at for request in trace] == [0.0, 2.0, 0.0, 2.0, 0.0]
    assert [request.client for request in trace] == [0, 0, 1, 1, 0]


def test_chats_in_a_closed_loop_follow_the_last_turn_of_the_one_before() -> None:
    trace = list(generate(spec(num_requests=8, turns=2, max_concurrency=2)))
    assert [request.follows for request in trace] == [None, 0, None, 2, 1, 4, 3, 6]
    assert [request.continues for request in trace[4:]] == [False, True, False, True]


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    trace = list(generate(spec(prefix_groups=3, prefix_len=5, shuffle_groups=False)))
    assert [request.segments[0] for request in trace] == [(i // 4, 5) for i in range(12)]
    assert len({request.segments[1] for request in trace}) == 12
    assert all(request.num_own_tokens == 13 for request in trace)


def test_shuffled_groups_are_as_large_and_depend_on_the_seed() -> None:
    orders = [
        [
            request.segments[0][0]
            for request in generate(spec(prefix_groups=3, prefix_len=5, seed=s))
        ]
        for s in range(2)
    ]
    assert all(sorted(order) == [0] * 4 + [1] * 4 + [2] * 4 for order in orders)
    assert orders[0] != orders[1]


def test_only_the_first_turn_of_a_chat_brings_the_prefix() -> None:
    trace = list(generate(spec(turns=3, prefix_groups=2, prefix_len=5)))
    assert [len(request.segments) for request in trace] == [2, 1, 1] * 4


def test_a_million_requests_are_made_one_by_one() -> None:
    huge = spec(num_requests=1_000_000, request_rate=100.0, turns=2, prefix_groups=0)
    assert [request.at for request in itertools.islice(generate(huge), 1)] == [0.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, "num_requests must be positive"),
        ({"request_rate": 0.0}, "request_rate must be positive"),
        ({"request_rate": math.nan}, "request_rate must be positive"),
        ({"burstiness": -1.0}, "burstiness must be positive"),
        ({"max_concurrency": 0}, "max_concurrency must be positive"),
        ({"turns": 0}, "turns must be positive"),
        ({"num_clients": 0}, "num_clients must be positive"),
        ({"think_time": -0.1}, "think_time must be 0 or more"),
        ({"prefix_groups": 2}, "go together"),
        ({"prefix_len": 2}, "go together"),
        ({"max_concurrency": 2, "request_rate": 5.0}, "closed loop"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**changes)
