"""Endpoints beside OpenAI's, headers, API keys, and hostile clients."""

import json
import re
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.client import Client
from tests.gateway import MODEL, running_gateway
from tests.server import Server, settle, wait_until

TEXT = "The quick brown fox"
ORIGIN = "https://example.org"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


class Answer:
    """A complete HTTP response."""

    def __init__(self, status: int, headers: Any, data: bytes) -> None:
        self.status, self.headers, self.data = status, headers, data

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


def call(
    url: str, body: Any = None, method: str = "", headers: dict[str, str] | None = None
) -> Answer:
    """Send a GET, or a POST of an object or of bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers or {}, method=method or None)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read())


@pytest.fixture(scope="module")
def guarded(server: Server, llama_dir: Path) -> Iterator[str]:
    """A gateway with keys, an allowed origin and a small body limit."""
    flags = ["--api-key", "first,second", "--allowed-origins", ORIGIN, "--max-body-bytes", "4096"]
    with running_gateway(server.endpoint, llama_dir, *flags) as url:
        yield url


# --- endpoints ------------------------------------------------------------------------------------


def test_the_model_is_listed_and_found_by_name(gateway: str) -> None:
    listed = call(f"{gateway}/v1/models").json["data"]
    assert [model["id"] for model in listed] == [MODEL]
    assert listed[0]["max_model_len"] == 256
    assert call(f"{gateway}/v1/models/{MODEL}").json == listed[0]
    assert call(f"{gateway}/v1/models/other").status == 404


def test_tokenize_and_detokenize_are_inverse(gateway: str) -> None:
    tokens = call(f"{gateway}/tokenize", {"prompt": TEXT}).json
    assert tokens["count"] == len(tokens["tokens"])
    assert call(f"{gateway}/detokenize", {"tokens": tokens["tokens"]}).json["text"] == TEXT
    chat = call(f"{gateway}/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    text = call(f"{gateway}/detokenize", {"tokens": chat["tokens"]}).json["text"]
    assert text.startswith("<|im_start|>user\nhi")
    refused = call(f"{gateway}/detokenize", {"tokens": [600]})
    assert (refused.status, refused.error["param"]) == (400, "tokens")


def test_generate_has_sglangs_shape(gateway: str) -> None:
    ids = call(f"{gateway}/tokenize", {"prompt": TEXT}).json["tokens"]
    by_text = call(f"{gateway}/generate", {"text": TEXT, "sampling_params": GREEDY}).json
    by_ids = call(f"{gateway}/generate", {"input_ids": ids, "sampling_params": GREEDY}).json
    assert by_text["text"] == by_ids["text"]
    assert len(by_text["output_ids"]) == 6
    assert by_text["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    batch = call(f"{gateway}/generate", {"text": [TEXT, "a"], "sampling_params": GREEDY}).json
    assert batch[0]["text"] == by_text["text"]
    stream = {"text": TEXT, "sampling_params": GREEDY, "stream": True}
    events = events_of(call(f"{gateway}/generate", stream).data)
    assert events[-1]["text"] == by_text["text"]
    assert events[-1]["output_ids"] == by_text["output_ids"]
    lengths = [event["meta_info"]["completion_tokens"] for event in events]
    assert lengths == sorted(lengths)


def events_of(stream: bytes) -> list[Any]:
    parts = stream.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_generate_has_logprobs_in_sglangs_format(gateway: str) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "return_logprob": True,
            "top_logprobs_num": 2, "logprob_start_len": 0}  # fmt: skip
    answer = call(f"{gateway}/generate", body).json
    output = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in output] == answer["output_ids"]
    tops = answer["meta_info"]["output_top_logprobs"]
    assert [top[0][:2] for top in tops] == [entry[:2] for entry in output]
    prompt = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in prompt] == [5, 6, 7]
    assert prompt[0][0] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "a", "input_ids": [1]}, "text"),
        ({}, "text"),
        ({"text": "a", "sampling_params": {"n": "two"}}, "n"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"no_such": 0}}, "no_such"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [600]}, "input_ids"),
    ],
)
def test_generate_names_the_field_that_is_wrong(gateway: str, body: Any, param: str) -> None:
    answer = call(f"{gateway}/generate", body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_generate_has_logprobs_in_a_stream_too(gateway: str) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": GREEDY, "return_logprob": True}
    body |= {"top_logprobs_num": 2, "logprob_start_len": 1}
    whole = call(f"{gateway}/generate", body).json["meta_info"]
    assert [entry[1] for entry in whole["input_token_logprobs"]] == [6, 7]
    assert len(whole["output_token_logprobs"]) == len(whole["output_top_logprobs"]) == 6
    events = events_of(call(f"{gateway}/generate", body | {"stream": True}).data)
    for event in events:
        meta, count = event["meta_info"], len(event["output_ids"])
        assert meta["output_token_logprobs"] == whole["output_token_logprobs"][:count]
        assert meta["input_top_logprobs"] == whole["input_top_logprobs"]
    alone = call(f"{gateway}/generate", body | {"sampling_params": {"max_new_tokens": 0}}).json
    assert (alone["text"], alone["output_ids"]) == ("", [])
    assert alone["meta_info"]["input_token_logprobs"] == whole["input_token_logprobs"]


def test_abort_request_ends_a_stream_with_what_it_had(gateway: str, server: Server) -> None:
    body = {"text": TEXT, "rid": "abc", "stream": True}
    body["sampling_params"] = GREEDY | {
        "max_new_tokens": 250, "temperature": 1, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(f"{gateway}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as stream:
        first = stream.readline()
        duplicate = call(f"{gateway}/generate", {"text": "a", "rid": "abc"})
        assert call(f"{gateway}/abort_request", {"rid": "abc"}).json == {"aborted": 1}
        last = events_of(first + stream.read())[-1]
    assert last["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert (duplicate.status, duplicate.error["param"]) == (400, "rid")
    assert call(f"{gateway}/abort_request", {"rid": "abc"}).json == {"aborted": 0}
    assert call(f"{gateway}/abort_request", {}).error["param"] == "rid"
    settle(server.endpoint)


def test_flush_cache_empties_the_cache(gateway: str, server: Server) -> None:
    prompt = list(range(3, 103))
    call(f"{gateway}/v1/completions", {"prompt": prompt, "max_tokens": 2})
    settle(server.endpoint)
    assert call(f"{gateway}/flush_cache", b"").json["flushed_pages"] >= 6
    uncached = call(f"{gateway}/v1/completions", {"prompt": prompt, "max_tokens": 2}).json
    assert uncached["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_a_message_asks_to_keep_is_counted_and_released(gateway: str, server: Server) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
    body["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    first, second = (call(f"{gateway}/v1/messages", body).json["usage"] for _ in range(2))
    settle(server.endpoint)
    for usage in (first, second):
        counts = [usage[f"cache_{what}_input_tokens"] for what in ("read", "creation")]
        assert sum(counts) % call(f"{gateway}/server_info").json["page_size"] == 0
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    metrics = call(f"{gateway}/metrics").data.decode()
    assert "quadriga:cache_pinned_pages{" in metrics
    assert call(f"{gateway}/v1/cache/release", {"prompt_cache_key": "none"}).json["released"] == 0
    assert call(f"{gateway}/v1/cache/release", {}).json["released"] >= 1


def test_probes_and_facts(gateway: str) -> None:
    for path in ("livez", "readyz", "health"):
        assert call(f"{gateway}/{path}").status == 200
    info = call(f"{gateway}/server_info").json
    assert (info["context_length"], info["default_max_tokens"]) == (256, 1024)
    assert info["pids"]["http_proc"] not in (0, info["pids"]["tokenizer_proc"])


def test_metrics_count_what_requests_took(gateway: str) -> None:
    def value(name: str) -> float:
        text = call(f"{gateway}/metrics").data.decode()
        match = re.search(rf"^quadriga:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])

    stages = ("tokenize", "queue", "prefill", "decode", "detokenize", "delivery", "inference")
    once = [f"request_{stage}_time_seconds_count" for stage in stages]
    once += ["request_params_n_count", "request_time_per_output_token_seconds_count"]
    names = ("generation_tokens_total", "inter_token_latency_seconds_count",
             "request_generation_tokens_count", *once)  # fmt: skip
    before = {name: value(name) for name in names}
    call(f"{gateway}/generate", {"text": TEXT, "sampling_params": GREEDY})
    assert value("generation_tokens_total") == before["generation_tokens_total"] + 6
    assert value("request_generation_tokens_count") == before["request_generation_tokens_count"] + 1
    gaps = before["inter_token_latency_seconds_count"]
    assert value("inter_token_latency_seconds_count") == gaps + 5
    assert value("kv_cache_usage_perc") == value("num_used_tokens") == 0
    assert {value(name) - before[name] for name in once} == {1}
    assert value("iteration_tokens_total_count") == value("steps_total")
    assert value("iteration_tokens_total_sum") >= value("generation_tokens_total")
    assert value("cache_config_info") == 1
    assert value("per_stage_req_latency_seconds_count") > 0 < value("request_params_n_count")
    assert value("process_cpu_seconds_total") >= 0


def test_the_openapi_document_names_every_endpoint_and_field(gateway: str) -> None:
    document = call(f"{gateway}/openapi.json").json
    assert {"/v1/completions", "/v1/chat/completions", "/generate"} <= set(document["paths"])
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "temperature", "stream"} <= set(fields)
    page = call(f"{gateway}/docs").data.decode()
    assert "openapi.json" in page
    assert not re.search(r"(src|href)=\"?(https?:)?//", page), "nothing from other hosts"


# --- authentication and CORS ----------------------------------------------------------------------


def test_without_a_key_only_the_probes_answer(guarded: str) -> None:
    assert call(f"{guarded}/livez").status == 200
    assert call(f"{guarded}/health").status == 200
    for path in ("v1/models", "metrics", "openapi.json", "no/such/path"):
        refused = call(f"{guarded}/{path}")
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    wrong = {"Authorization": "Bearer third"}
    assert call(f"{guarded}/v1/models", headers=wrong).status == 401
    for key in ("first", "second"):
        right = {"Authorization": f"Bearer {key}"}
        assert call(f"{guarded}/v1/models", headers=right).status == 200


def test_only_allowed_origins_get_cors_headers(guarded: str, gateway: str) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    preflight = call(f"{guarded}/v1/completions", method="OPTIONS", headers=asked)
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert preflight.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE"
    evil = call(f"{guarded}/livez", headers={"Origin": "https://evil.example"})
    assert evil.headers["Access-Control-Allow-Origin"] is None
    assert call(f"{gateway}/livez", headers=asked).headers["Access-Control-Allow-Origin"] is None


def test_a_request_keeps_its_id_and_gets_one_where_it_has_none(gateway: str) -> None:
    named_request = call(f"{gateway}/livez", headers={"X-Request-Id": "my-id.7"})
    assert named_request.headers["X-Request-Id"] == "my-id.7"
    body = {"prompt": "a", "max_tokens": 1}
    completion = call(f"{gateway}/v1/completions", body, headers={"X-Request-Id": "my-id.7"})
    assert completion.json["id"] == "cmpl-my-id.7"
    odd = call(f"{gateway}/livez", headers={"X-Request-Id": "no words"})
    assert re.fullmatch("[0-9a-f]{32}", odd.headers["X-Request-Id"])


def test_tls_files_make_it_https(server: Server, llama_dir: Path, tmp_path: Path) -> None:
    from http_proc.server import tls_context
    from quadriga.errors import ConfigError
    from quadriga.server.config.frontend_args import HttpArgs

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-days", "1", "-nodes", "-newkey", "rsa:2048"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *subject, *files], check=True, capture_output=True)
    args = HttpArgs(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    assert isinstance(tls_context(args), ssl.SSLContext)
    assert args.url.startswith("https://")
    with pytest.raises(ConfigError, match=r"none\.pem"):
        tls_context(HttpArgs(ssl_certfile=str(tmp_path / "none.pem")))


# --- hostile input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[]", b"5", b'"text"', b"{" * 50_000, b"[" * 200_000,
     b'{"prompt": "\\ud800"}', b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}"],
)  # fmt: skip
def test_an_invalid_request_is_a_400_in_openais_format(gateway: str, body: bytes) -> None:
    for path in ("v1/completions", "v1/chat/completions", "generate", "tokenize"):
        answer = call(f"{gateway}/{path}", body)
        assert answer.status == 400
        assert set(answer.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"content": "x"}]},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": {"type": "function"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "horse"}, "strict": True},
            }
        },
        {"top_logprobs": 5},
        {"stream_options": {"every": 1}},
        {"chat_template_kwargs": 5},
        {"audio": {}},
    ],
)
def test_a_chat_that_cannot_be_is_a_400_that_names_the_field(gateway: str, fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields
    answer = call(f"{gateway}/v1/chat/completions", body)
    assert answer.status == 400
    assert next(iter(fields)) in (answer.error["param"] or "") + answer.error["message"]


def test_a_body_over_the_limit_is_413(guarded: str) -> None:
    key = {"Authorization": "Bearer first"}
    answer = call(f"{guarded}/v1/completions", {"prompt": "a" * 5000}, headers=key)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert "4096 bytes" in answer.error["message"]


def test_a_client_that_is_gone_mid_stream_leaves_nothing_running(
    gateway: str, server: Server
) -> None:
    with Client(server.endpoint) as ring:
        before = ring.info()["ended"]["abort"]
        for stream in (True, False):
            body = {"prompt": [5], "max_tokens": 250, "stream": stream, "ignore_eos": True, "n": 4}
            connection = send(gateway, json.dumps(body).encode())
            if stream:
                connection.recv(100)
            else:
                wait_until(lambda: ring.info()["running"] > 0, 10)
            connection.close()
            settle(server.endpoint)
        assert ring.info()["ended"]["abort"] > before


def send(gateway: str, body: bytes) -> socket.socket:
    host, port = gateway.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_bytes_that_are_not_http_disturb_no_other_client(gateway: str) -> None:
    host, port = gateway.removeprefix("http://").split(":")
    for junk in (b"\x00" * 100, b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"A" * 100_000):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(junk)
    threads = [threading.Thread(target=call, args=(f"{gateway}/livez",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert call(f"{gateway}/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
