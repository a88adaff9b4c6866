"""W3C Trace Context, and which requests are sampled."""

import random

import pytest

from quadriga.server.tracing.context import HeadSampling, continued, started, traceparent_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
NOT_SAMPLED = f"00-{TRACE}-{PARENT}-00"


def test_a_traceparent_gives_the_trace_the_parent_and_the_flag() -> None:
    context = continued(SAMPLED)
    assert context is not None
    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, PARENT, True)
    assert context.span_id != PARENT
    other = continued(NOT_SAMPLED)
    assert other is not None
    assert not other.sampled


def test_a_span_names_itself_as_the_parent_of_what_it_causes() -> None:
    context = continued(SAMPLED)
    assert context is not None
    assert traceparent_of(context) == f"00-{TRACE}-{context.span_id}-01"
    below = continued(traceparent_of(context))
    assert below is not None
    assert (below.trace_id, below.parent_id) == (TRACE, context.span_id)


def test_further_fields_and_flags_of_a_later_version_are_skipped() -> None:
    for text in (f"cc-{TRACE}-{PARENT}-09-what-else", f"01-{TRACE}-{PARENT}-01", f" {SAMPLED} "):
        context = continued(text)
        assert context is not None, text
        assert context.sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE[:-1]}٣-{PARENT}-01",
        f"01-{TRACE}-{PARENT}-01-" + "x" * 1000,
    ],
)
def test_a_malformed_traceparent_is_ignored(text: str) -> None:
    assert continued(text) is None
    assert HeadSampling(0.0, keeps_all=False).context(text) is None
    context = HeadSampling(1.0, keeps_all=False).context(text)
    assert context is not None
    assert context.trace_id != TRACE


def test_the_decision_of_the_caller_is_kept_whatever_the_ratio_is() -> None:
    for ratio in (0.0, 1.0):
        sampling = HeadSampling(ratio, keeps_all=False)
        context = sampling.context(SAMPLED)
        assert context is not None
        assert context.sampled
        assert sampling.context(NOT_SAMPLED) is None


def test_the_ratio_decides_about_the_others() -> None:
    random.seed(1)
    sampling = HeadSampling(0.25, keeps_all=False)
    contexts = [sampling.context("") for _ in range(4000)]
    sampled = [context for context in contexts if context is not None]
    assert 900 < len(sampled) < 1100
    assert all(context.sampled and not context.parent_id for context in sampled)
    assert len({context.trace_id for context in sampled}) == len(sampled)


def test_traces_that_are_only_kept_are_not_sampled() -> None:
    sampling = HeadSampling(0.0, keeps_all=True)
    for text in ("", NOT_SAMPLED):
        context = sampling.context(text)
        assert context is not None
        assert not context.sampled
    assert traceparent_of(started(sampled=False)).endswith("-00")
    assert HeadSampling(0.0, keeps_all=False).is_off
    assert not sampling.is_off
