"""The place and the expected wait that a 429 names where the queue is full, in every API."""

import json
from typing import Any

import pytest

from http_proc.apis.llama_cpp import error_body
from http_proc.core.errors import from_server
from quadriga.errors import QueueFull, QuotaExceeded
from tests.unit.http.calls import answer_of
from tests.unit.scripted_ring import ScriptedRing

MODEL = {"model": "tiny"}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": MODEL | {"prompt": "hello"},
    "/v1/chat/completions": MODEL | MESSAGES,
    "/v1/responses": MODEL | {"input": "hello"},
    "/v1/messages": MODEL | MESSAGES | {"max_tokens": 8},
    "/api/chat": MODEL | MESSAGES,
    "/api/generate": MODEL | {"prompt": "hello"},
    "/generate": {"text": "hello"},
}
FULL = QueueFull("40 requests are waiting", 5, 41, 18.449)
HINT = {"queue_position": 41, "expected_wait": 18.4}


def refusal(path: str, error: QueueFull, stream: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the headers and the body of the answer to a request that the ring refuses."""
    ring = ScriptedRing([], error=error)
    answer = answer_of(ring, path, {"stream": stream} | BODIES[path])
    assert answer.status == 429
    return answer.headers, answer.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_api_says_where_a_refused_request_would_have_waited(path: str, stream: bool) -> None:
    headers, body = refusal(path, FULL, stream)
    names = ("Retry-After", "X-Queue-Position", "X-Expected-Wait")
    assert [headers[name] for name in names] == ["5", "41", "18.4"]
    error = body if path.startswith("/api/") else body["error"]
    assert HINT.items() <= error.items()


def test_infill_says_it_in_its_own_error() -> None:
    body = json.loads(error_body(from_server(FULL, {})))
    assert HINT.items() <= body["error"].items()


def test_a_refusal_for_another_limit_has_no_place_in_the_queue() -> None:
    headers, body = refusal("/v1/completions", QuotaExceeded("tenant a has used 5 requests", 12.5))
    assert headers["Retry-After"] == "13"
    assert (body["error"]["type"], body["error"]["code"]) == ("rate_limit_error", "quota_exceeded")
    assert "X-Queue-Position" not in headers and "X-Expected-Wait" not in headers
    assert not HINT.keys() & body["error"].keys()


def test_an_unknown_wait_is_left_out() -> None:
    headers, body = refusal("/v1/completions", QueueFull("full", 1, 41))
    assert headers["X-Queue-Position"] == "41" and "X-Expected-Wait" not in headers
    assert body["error"]["queue_position"] == 41 and "expected_wait" not in body["error"]
