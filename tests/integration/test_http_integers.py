"""Integers at and beyond every bound, in each API: a 4xx with field, value and limit."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.gateway import MODEL

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"model": MODEL, **CHAT},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/api/generate": {"model": MODEL, "prompt": "a", "stream": False},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/detokenize": {"tokens": [1]},
}
HUGE = 2**64
FAR = 10**400
WRONG: list[tuple[str, str, Any, str]] = [
    ("/v1/completions", "n", 0, "n is 0: must be from 1 to 128"),
    ("/v1/chat/completions", "n", 0, "n is 0: must be from 1 to 128"),
    ("/v1/chat/completions", "n", FAR, "n is a number of about 400 digits: must be from 1 to 128"),
    ("/generate", "sampling_params.n", 0, "n is 0: "),
    ("/v1/completions", "max_tokens", HUGE, f"max_tokens holds {HUGE}: integers of a request"),
    ("/v1/completions", "max_tokens", 2**63, f"max_tokens is {2**63}, the model's context is"),
    ("/v1/completions", "max_tokens", -FAR, "max_tokens is a negative number of about 400 digits"),
    ("/v1/messages", "max_tokens", HUGE, f"max_tokens holds {HUGE}: "),
    ("/v1/responses", "max_output_tokens", HUGE, f"max_output_tokens holds {HUGE}: "),
    ("/v1/completions", "top_k", 2**31, "top_k is 2147483648: must be from -1 to 2147483647"),
    ("/v1/completions", "stop_token_ids", [1, HUGE], f"stop_token_ids holds {HUGE}: "),
    ("/v1/completions", "stop_token_ids", [2**53 + 1], f"stop_token_ids holds {2**53 + 1}: ids"),
    ("/v1/completions", "logit_bias", {str(FAR): 1}, "logit_bias holds a number of about 400"),
    ("/v1/completions", "prompt", [1, 2**31], "prompt holds 2147483648: token ids are 0 to"),
    ("/v1/completions", "prompt", [[FAR]], "prompt holds a number of about 400 digits: "),
    ("/generate", "input_ids", [-FAR], "input_ids holds a negative number of about 400 digits: "),
    ("/api/generate", "context", [2**63], f"context holds {2**63}: token ids are 0 to"),
    ("/detokenize", "tokens", [HUGE], f"tokens holds {HUGE}: token ids are 0 to"),
    ("/v1/chat/completions", "top_logprobs", 2**53 + 1, "top_logprobs"),
    ("/v1/completions", "max_tokens", True, "max_tokens"),
    ("/v1/completions", "max_tokens", 1.5, "max_tokens"),
]


def refusal(gateway: str, path: str, data: bytes) -> str:
    """Return the message of a 4xx."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(gateway + path, data), timeout=30)
    assert 400 <= caught.value.code < 500
    error = json.loads(caught.value.read())["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def body_with(path: str, field: str, value: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(BODIES[path]))
    if field == "input_ids":
        del body["text"]
    outer, _, inner = field.rpartition(".")
    (body[outer] if outer else body)[inner] = value
    return body


@pytest.mark.parametrize(("path", "field", "value", "message"), WRONG)
def test_an_integer_out_of_range_is_named(
    path: str, field: str, value: Any, message: str, gateway: str
) -> None:
    found = refusal(gateway, path, json.dumps(body_with(path, field, value)).encode())
    assert message in found
    assert len(found) < 400


@pytest.mark.parametrize("number", ["1e400", "1" + 5000 * "0", "-1e999"])
@pytest.mark.parametrize("field", ["max_tokens", "sampling.deeper"])
def test_a_number_that_cannot_be_read_is_named_by_its_field(
    number: str, field: str, gateway: str
) -> None:
    outer, _, inner = field.partition(".")
    text = f'{{"prompt":"a","{outer}":' + (f'{{"{inner}":{number}}}}}' if inner else f"{number}}}")
    message = refusal(gateway, "/v1/completions", text.encode())
    assert message.startswith(f"{field} holds a number that is out of range: integers have at most")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [256, 300])
def test_a_prompt_of_the_contexts_length_cannot_be_scored(
    num_tokens: int, stream: bool, gateway: str
) -> None:
    """Its echo is decoded, and the error arrives meanwhile."""
    body = {"prompt": [5] * num_tokens, "max_tokens": 0, "echo": True, "stream": stream}
    message = refusal(gateway, "/v1/completions", json.dumps(body).encode())
    assert f"prompt has {num_tokens} tokens" in message
    assert "context is 256" in message
