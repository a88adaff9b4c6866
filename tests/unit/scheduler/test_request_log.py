"""The request log of the ring: which requests it has, and what their lines say."""

import logging

import pytest

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.server.processes.logs import RequestLogLevel
from quadriga.wire.client import ErrorInfo, gateway_address
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.observe.logs import RequestLog
from scheduler_proc.state.request import FinishReason, Request


def ended(client: bytes = b"\xab\xcdefgh", n: int = 1) -> Request:
    """Return a request of 10 s: 1 in the tokenizer, 2 in the queue, 3 in prefill, 4 in decode."""
    params = SamplingParams(max_new_tokens=9, seed=0, temperature=0, n=n)
    submit = Submit(client, "r-1", pack_ids([1, 2, 3]), params, True, 100.0, 101.0)
    request = Request.from_submit(0, submit, frozenset(), index=n - 1)
    request.admitted_at, request.first_token_at, request.cached_tokens = 103.0, 106.0, 2
    request.tokens.extend([7, 8, 9, 10])
    request.finish(FinishReason.LENGTH)
    return request


def lines_of(
    caplog: pytest.LogCaptureFixture, level: RequestLogLevel, request: Request
) -> list[str]:
    caplog.set_level(logging.INFO)
    RequestLog(level).on_finish(request, 110.0)
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


LINE = (
    "r-1 · client abcd6566 · length · 10.000 s · prompt 3 tokens, 2 cached · generated 4"
    " · queued 2.000 s · first token 6.000 s"
)


def test_a_request_is_one_line_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, RequestLogLevel(logs_all=True), ended()) == [f"INFO {LINE}"]


def test_a_slow_request_is_a_warning_with_its_stages(caplog: pytest.LogCaptureFixture) -> None:
    stages = "stages: tokenize 1.000 s, queue 2.000 s, prefill 3.000 s, decode 4.000 s"
    assert lines_of(caplog, RequestLogLevel(slow_s=10.0), ended()) == [
        f"WARNING slow: {LINE} · {stages}"
    ]


def test_a_request_that_is_not_slow_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, RequestLogLevel(slow_s=10.5), ended()) == []


def test_the_gateway_logs_its_requests_itself(caplog: pytest.LogCaptureFixture) -> None:
    request = ended(gateway_address().bytes)
    assert lines_of(caplog, RequestLogLevel(logs_all=True, slow_s=1.0), request) == []


def test_an_error_is_named_and_a_choice_numbered(caplog: pytest.LogCaptureFixture) -> None:
    request = ended(n=3)
    request.first_token_at = 0.0
    error = ErrorInfo.of(InvalidRequest("no token is left\nhere"))
    request.finish(FinishReason.ERROR, error=error)
    (line,) = lines_of(caplog, RequestLogLevel(logs_all=True), request)
    assert " · choice 2 · error · " in line and "first token" not in line
    assert line.endswith(" · invalid_request: no token is left\\nhere")
