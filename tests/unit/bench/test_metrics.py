"""The metric definitions, with exact values for records made by hand."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client.load_generator import RequestRecord
from bench.report.metrics import Sizes, is_within, summarize
from simulator.latency import Goodput, Slo, percentile, spread


def record(index: int = 0, **changes: object) -> RequestRecord:
    """Return a record sent at 100 s: 10 ms transfer, 20 tokenize, 30 queue, 40 prefill, 50 back."""
    values: dict[str, object] = {
        "submit_start": 100.0,
        "submit_end": 100.001,
        "received": 100.010,
        "tokenized": 100.030,
        "admitted": 100.060,
        "first_token": 100.100,
        "token_times": [100.100, 100.200, 100.350],
        "arrivals": [100.150, 100.250, 100.450],
        "finished": 100.500,
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "cached_tokens": 2,
    }
    return RequestRecord(index, **{**values, **changes})  # type: ignore[arg-type]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2), st.integers(1, 99))
def test_percentile_agrees_with_the_inclusive_quantiles(values: list[float], q: int) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")[q - 1]
    assert percentile(values, q) == pytest.approx(expected, abs=1e-6)
    assert percentile(values[:1], q) == values[0]


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_negative_difference_counts_as_zero() -> None:
    result = spread([-1.0, 0.002])
    assert result is not None
    assert (result.p50, result.max, result.count) == (1.0, 2.0, 2)
    assert spread([]) is None


def test_every_time_is_measured_as_it_is_defined() -> None:
    summary = summarize([record()], submit_wall=0.25)
    expected = {
        "add_request": 1.0,
        "to_server": 10.0,
        "tokenize": 20.0,
        "queue_wait": 30.0,
        "prefill": 40.0,
        "delivery": 50.0,
        "ttft": 150.0,
        "tpot": 150.0,
        "latency": 500.0,
    }
    for name, milliseconds in expected.items():
        assert getattr(summary, name).p50 == pytest.approx(milliseconds, abs=1e-3), name
    assert summary.submit_wall == 0.25
    assert summary.submit_lag is None
    assert summary.parts_gap == pytest.approx(0.0, abs=1e-6)


def test_itl_pools_all_gaps_between_consecutive_tokens() -> None:
    summary = summarize([record(0), record(1, token_times=[1.0, 1.5], arrivals=[2.0, 2.0])], 0.0)
    assert summary.itl is not None and summary.itl_received is not None
    assert summary.itl.count == 3
    assert summary.itl.p50 == pytest.approx(150.0)
    assert summary.itl.max == pytest.approx(500.0)
    assert summary.itl_received.count == 3
    assert summary.itl_received.p50 == pytest.approx(100.0)


def test_tpot_skips_requests_of_one_token() -> None:
    summary = summarize([record(token_times=[1.0], arrivals=[1.0])], 0.0)
    assert summary.tpot is None
    assert summary.itl is None


def test_throughput_is_from_the_first_submit_to_the_last_finish() -> None:
    late = record(1, submit_start=101.0, finished=103.0, completion_tokens=6)
    summary = summarize([record(), late], 1.0)
    assert summary.duration == pytest.approx(3.0)
    assert summary.throughput == pytest.approx(9 / 3.0)
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (14, 9, 4)


def test_submit_lag_is_against_the_absolute_schedule_and_never_negative() -> None:
    records = [record(0, due=100.0), record(1, due=99.98), record(2, due=100.5)]
    lag = summarize(records, 0.0).submit_lag
    assert lag is not None
    assert lag.p50 == 0.0
    assert lag.max == pytest.approx(20.0)


def test_failed_requests_are_counted_and_leave_the_times_alone() -> None:
    failed = record(1, error="QueueFull: full", finished=900.0, arrivals=[300.0, 400.0])
    summary = summarize([record(), failed], 0.0)
    assert (summary.requests, summary.failed) == (2, 1)
    assert summary.first_error == "QueueFull: full"
    assert summary.completion_tokens == 3
    assert summary.ttft is not None and summary.ttft.count == 1
    assert summary.add_request is not None and summary.add_request.count == 2


def test_nothing_done_gives_no_figures() -> None:
    summary = summarize([record(error="ServerFailed: gone")], 0.0)
    assert summary.throughput is None
    assert summary.ttft is None
    assert summary.parts_gap is None


def test_a_stage_that_was_not_reached_is_left_out() -> None:
    summary = summarize([record(admitted=0.0)], 0.0)
    assert summary.queue_wait is None
    assert summary.prefill is None
    assert summary.parts_gap is None
    assert summary.ttft is not None


def test_stamps_out_of_order_show_in_the_sum_of_the_parts() -> None:
    summary = summarize([record(), record(1, tokenized=100.005)], 0.0)
    assert summary.parts_gap == pytest.approx(5.0, abs=1e-3)


def test_a_request_that_could_not_be_sent_is_failed_and_nothing_else() -> None:
    unsent = RequestRecord(1, error="not sent", finished=100.2)
    summary = summarize([record(), unsent], 0.0)
    assert (summary.requests, summary.failed) == (2, 1)
    assert summary.duration == pytest.approx(0.5)
    assert summary.add_request is not None and summary.add_request.count == 1


def test_rate_lengths_and_cache_hits_are_over_the_requests_that_were_done() -> None:
    other = record(1, prompt_tokens=13, completion_tokens=6, cached_tokens=8, finished=102.0)
    summary = summarize([record(), other, record(2, error="x", prompt_tokens=99)], 0.0)
    assert summary.request_rate == pytest.approx(1.0)
    assert summary.input_len == Sizes(10.0, 7, 13)
    assert summary.output_len == Sizes(4.5, 3, 6)
    assert summary.cache_hit_rate == pytest.approx(10 / 20)


def test_goodput_counts_the_requests_that_keep_every_limit() -> None:
    late = record(1, arrivals=[100.250, 100.30, 100.35], finished=102.0)
    slow = record(2, arrivals=[100.150, 101.0, 101.2])
    records = [record(), late, slow, record(3, error="QueueFull: full")]
    assert summarize(records, 0.0).goodput is None
    expected = {Slo(200.0, 200.0): 1, Slo(ttft_ms=200.0): 2, Slo(tpot_ms=200.0): 2, Slo(1.0): 0}
    for slo, kept in expected.items():
        assert summarize(records, 0.0, slo).goodput == Goodput(kept, kept / 4, kept / 2.0)


def test_a_request_of_one_token_keeps_any_tpot() -> None:
    one = record(arrivals=[100.1], token_times=[100.1])
    assert is_within(Slo(tpot_ms=0.001), one)
    assert not is_within(Slo(ttft_ms=99.0), one)
    assert not is_within(Slo(ttft_ms=999.0), record(arrivals=[]))


def test_several_clients_have_figures_of_their_own() -> None:
    slow = record(1, client=5, arrivals=[100.9], token_times=[100.9], completion_tokens=1)
    failed = record(2, client=5, error="x")
    light, heavy = summarize([slow, failed, record(0, client=3)], 0.0).clients
    assert (light.client, light.requests, light.failed) == (3, 1, 0)
    assert (heavy.client, heavy.requests, heavy.failed) == (5, 2, 1)
    assert light.ttft is not None and light.ttft.p50 == pytest.approx(150.0)
    assert heavy.ttft is not None and heavy.ttft.p50 == pytest.approx(900.0)
    assert light.itl is not None and light.itl.count == 2
    assert heavy.itl is None
    assert heavy.completion_tokens == 1


def test_one_client_has_no_figures_beside_those_of_all() -> None:
    assert summarize([record(), record(1)], 0.0).clients == ()
