"""Ollama's API in front of a scripted ring."""

import json
from typing import Any

import pytest

from http_proc.apis import ollama
from quadriga.client.types import LikelyToken, TokenLogprob
from quadriga.server.answer_format import AnswerFormat, ReasoningFormat, to_info
from quadriga.server.model_info import (
    FillFormat,
    ModelDetails,
    details_to_info,
    fill_format_to_info,
)
from tests.unit.http.calls import answer_of, send
from tests.unit.scripted_ring import HERMES, ScriptedRing, gateway_before

HELLO = [{"role": "user", "content": "Hello!"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REASONS = {
    "answer_format": to_info(
        AnswerFormat(calls=HERMES, reasoning=ReasoningFormat(switch="thinks"), takes_tools=True)
    )
}
DETAILS = ModelDetails(
    family="llama",
    container="gguf",
    weight_format="Q4_1",
    num_parameters=134_515_008,
    num_bytes=96_576_768,
    digest="abc",
    modified_at=1_700_000_000.5,
    dimensions={"num_hidden_layers": 30, "num_key_value_heads": 3},
)


def asked(ring: ScriptedRing, path: str, body: dict[str, Any]) -> str:
    """Return the text of the answer to a request that is right."""
    if path == "/api/chat":
        body = {"messages": HELLO} | body
    answer = answer_of(ring, path, {"model": "tiny"} | body)
    assert answer.status == 200, answer.text
    return answer.text


def ask(ring: ScriptedRing, path: str = "/api/chat", **body: Any) -> dict[str, Any]:
    """Return the whole answer."""
    answer: dict[str, Any] = json.loads(asked(ring, path, {"stream": False} | body))
    return answer


def lines(ring: ScriptedRing, path: str = "/api/chat", **body: Any) -> list[dict[str, Any]]:
    """Return the lines of a stream, which is the default."""
    return [json.loads(line) for line in asked(ring, path, body).splitlines()]


def refusal(path: str, ring: ScriptedRing | None = None, **body: Any) -> tuple[int, str]:
    """Return status and message of an error."""
    answer = answer_of(ring or ScriptedRing(["a"]), path, {"model": "tiny"} | body)
    assert answer.body.keys() == {"error"}
    return answer.status, answer.body["error"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_numbers_are_cast_and_unknown_options_warned_of_as_at_ollama(
    caplog: pytest.LogCaptureFixture, path: str
) -> None:
    ring = ScriptedRing(["a"])
    options = {"num_ctx": 2048.0, "num_predict": 7.9, "seed": 3.0, "top_k": 40.0, "penalise": 1}
    ollama._warn_of_unknown.cache_clear()
    ask(ring, path, options=options, **({} if path == "/api/chat" else {"prompt": "x"}))
    params = ring.submitted[-1][1]
    assert (params.max_new_tokens, params.seed, params.top_k) == (7, 3, 40)
    assert sum("'penalise'" in record.getMessage() for record in caplog.records) == 1


def test_a_chat_is_streamed_as_lines_whose_last_has_the_numbers() -> None:
    parts = lines(ScriptedRing(["Good ", "day."]))
    assert [part["message"]["content"] for part in parts] == ["Good ", "day.", ""]
    assert [part["done"] for part in parts] == [False, False, True]
    last = parts[-1]
    assert last["done_reason"] == "stop" and last["model"] == "tiny"
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, 2)
    assert all(isinstance(last[name], int) for name in ("total_duration", "load_duration",
               "prompt_eval_duration", "eval_duration"))  # fmt: skip
    assert parts[0]["created_at"].endswith("Z") and "done_reason" not in parts[0]


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_a_whole_answer_is_one_object_with_the_name_of_the_request(name: str) -> None:
    answer = ask(ScriptedRing(["Good ", "day."]), model=name)
    assert answer["message"] == {"role": "assistant", "content": "Good day."}
    assert answer["done"] is True and answer["model"] == name


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_a_call_is_whole_in_one_line_with_its_arguments_as_an_object(cut: int) -> None:
    text = "Let me see. " + CALL
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    parts = lines(ScriptedRing(pieces), tools=TOOLS)
    (calling,) = [part["message"] for part in parts if "tool_calls" in part["message"]]
    (call,) = calling["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}
    assert call["id"]
    assert "".join(part["message"]["content"] for part in parts).strip() == "Let me see."
    whole = ask(ScriptedRing(pieces), tools=TOOLS)["message"]
    assert whole["tool_calls"][0]["function"] == call["function"]
    assert parts[-1]["done_reason"] == "stop"


def test_a_call_that_is_cut_off_is_text() -> None:
    cut_off = CALL[: CALL.index("Rome")]
    parts = lines(ScriptedRing([*cut_off]), tools=TOOLS)
    whole = ask(ScriptedRing([cut_off]), tools=TOOLS)["message"]
    text = "".join(part["message"]["content"] for part in parts)
    assert "weather" in text and '{"city": "' in text
    assert whole["content"] == text and "tool_calls" not in whole


def test_the_answer_of_a_tool_gets_the_id_of_its_call() -> None:
    ring = ScriptedRing(["Sunny."])
    called = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("a", "b", "a")]
    answers = [
        {"role": "tool", "content": "1", "tool_name": "b"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3", "tool_name": "a"},
    ]
    asking = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": called}
    ask(ring, messages=[*HELLO, asking, *answers])
    _, turn, *results = ring.submitted[0][0]
    ids = [call["id"] for call in turn["tool_calls"]]
    assert turn["reasoning_content"] == "Hm."
    assert turn["tool_calls"][0]["function"] == {"name": "a", "arguments": {"n": 1}}
    assert [(r["name"], r["tool_call_id"]) for r in results] == [
        ("b", ids[1]), ("a", ids[0]), ("a", ids[2]),
    ]  # fmt: skip


def test_the_begin_of_an_answer_is_continued() -> None:
    ring = ScriptedRing([" Rome."])
    ask(ring, messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    assert ring.submitted[0][2]["chat"].continue_final_message
    ask(ring)
    assert not ring.submitted[1][2]["chat"].continue_final_message


def test_reasoning_is_the_field_thinking() -> None:
    pieces = ["<think>", "Hm.", "</think>", "Yes."]
    parts = lines(ScriptedRing(pieces, **REASONS), think="high")
    assert "".join(part["message"].get("thinking", "") for part in parts) == "Hm."
    assert "".join(part["message"]["content"] for part in parts) == "Yes."
    ring = ScriptedRing(pieces, **REASONS)
    assert ask(ring, think=True)["message"]["thinking"] == "Hm."
    assert ring.submitted[0][2]["chat"].template_args == {"thinks": True}


def test_options_have_ollamas_names_and_the_rest_of_the_context_is_no_error() -> None:
    ring = ScriptedRing(["a"])
    options = {"num_predict": 5, "temperature": 0, "repeat_penalty": 1.2, "seed": -1, "stop": "x",
               "num_ctx": 8192, "mirostat": 0, "top_k": 3}  # fmt: skip
    ask(ring, options=options, truncate=True, keep_alive="5m", format="json")
    _, params, given = ring.submitted[0]
    assert (params.max_new_tokens, params.temperature, params.top_k) == (5, 0, 3)
    assert params.repetition_penalty == 1.2 and params.seed is None and params.stop == "x"
    assert params.json_schema == {"type": "object"}
    assert given["clamp_max_new_tokens"] and given["truncate_prompt"]
    ask(ring, options={"num_predict": -1}, format={"type": "array"})
    assert ring.submitted[1][1].max_new_tokens == 100  # the context
    assert ring.submitted[1][1].json_schema == {"type": "array", "x-guidance": {"lenient": True}}
    ask(ring)
    assert ring.submitted[2][1].max_new_tokens is None


def test_logprobs_come_with_their_tokens() -> None:
    ring = ScriptedRing(["a"])
    token = TokenLogprob(1, -0.5, b"a", [LikelyToken(1, -0.5, b"a")])
    plain = ring.completion

    def completion() -> Any:
        made = plain()
        made.logprobs = [token]
        return made

    ring.completion = completion  # type: ignore[method-assign]
    answer = ask(ring, logprobs=True, top_logprobs=1)
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert answer["logprobs"] == [entry | {"top_logprobs": [entry]}]
    assert ring.submitted[0][1].logprobs == 1


def test_an_error_in_a_stream_is_its_last_line() -> None:
    ring = ScriptedRing(["a"], leaves_open=True)
    parts = lines(ring)
    assert parts[-1].keys() == {"error"} and "worker_proc died" in parts[-1]["error"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"messages": HELLO, "model": "other"}, 404, "'other' is not served"),
        ({"messages": [HELLO[0] | {"images": ["aGk="]}]}, 400, "messages[0].images has 1 images"),
        ({"messages": [{"role": "tool", "content": "1"}]}, 400, "answers no call"),
        ({"messages": HELLO, "think": True}, 400, "tiny does not reason"),
        ({"messages": HELLO, "top_logprobs": 2}, 400, "needs logprobs"),
        ({"messages": HELLO, "options": {"typical_p": 0.5}}, 400, "options.typical_p is 0.5"),
        ({"messages": HELLO, "tool": []}, 400, "tool is not a field"),
        ({"messages": HELLO, "format": "yaml"}, 400, "yaml"),
    ],
)
def test_what_cannot_be_obeyed_is_an_error_in_ollamas_format(
    body: dict[str, Any], status: int, said: str
) -> None:
    got, message = refusal("/api/chat", **body)
    assert (got, said in message) == (status, True), message


def test_a_prompt_is_a_turn_of_the_user_after_the_system() -> None:
    ring = ScriptedRing(["Good ", "day."])
    parts = lines(ring, "/api/generate", prompt="Hi", system="Be brief.")
    assert [part["response"] for part in parts] == ["Good ", "day.", ""]
    assert ring.submitted[0][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    answer = ask(ring, "/api/generate", prompt="Hi")
    assert answer["response"] == "Good day." and "context" not in answer
    assert answer["done_reason"] == "stop"


@pytest.mark.parametrize(("facts", "raw"), [({}, True), ({"chat": False}, False)])
def test_a_raw_prompt_and_one_of_a_base_model_are_sent_as_they_are(
    facts: dict[str, Any], raw: bool
) -> None:
    ring = ScriptedRing(["a"], **facts)
    ask(ring, "/api/generate", prompt="Once", raw=raw)
    assert ring.submitted[0][0] == "Once"


def test_a_suffix_asks_for_the_text_between() -> None:
    marks = FillFormat(prefix="<P>", suffix="<S>", middle="<M>", stop_token_ids=[7])
    ring = ScriptedRing(["a"], fill_format=fill_format_to_info(marks))
    ask(ring, "/api/generate", prompt="x", suffix="y")
    prompt, params, _ = ring.submitted[0]
    assert prompt == "<P>x<S>y<M>" and params.stop_token_ids == [7]


def test_a_context_goes_before_the_prompt_and_comes_back() -> None:
    class Tokenizing(ScriptedRing):
        async def tokenize(self, prompt: Any, chat: Any) -> list[int]:
            assert prompt == [{"role": "user", "content": "Hi"}]
            return [8, 9]

        async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str:
            assert (ids, skip_special_tokens) == ([8, 9], False)
            return "assistant\n<think>"

    ring = Tokenizing(["Hm.</think>Yes."], **REASONS)
    answer = ask(ring, "/api/generate", prompt="Hi", context=[5])
    assert ring.submitted[0][0] == [5, 8, 9]
    assert answer["context"] == [5, 8, 9, 1]  # the ring's answer has the id 1
    assert (answer["thinking"], answer["response"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_request_without_input_says_that_the_model_is_loaded(path: str) -> None:
    ring = ScriptedRing([])
    answer = answer_of(ring, path, {"model": "tiny", "keep_alive": -1})
    assert answer.status == 200 and answer.body["done_reason"] == "load"
    assert not ring.submitted


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        ({"prompt": "x", "images": ["aGk="]}, "images has 1 images"),
        ({"prompt": "x", "raw": True, "system": "y"}, "raw and system"),
        ({"prompt": "x", "suffix": "y"}, "<|fim_prefix|>"),
        ({"prompt": "x", "suffix": "y", "context": [1]}, "suffix and context"),
    ],
)
def test_what_generate_cannot_do_is_a_400(body: dict[str, Any], said: str) -> None:
    status, message = refusal("/api/generate", **body)
    assert status == 400 and said in message


def test_a_system_message_needs_a_chat_template() -> None:
    ring = ScriptedRing(["a"], chat=False)
    status, message = refusal("/api/generate", ring, prompt="x", system="y")
    assert status == 400 and "has none" in message


def test_the_model_is_listed_and_described() -> None:
    ring = ScriptedRing([], model_details=details_to_info(DETAILS), **REASONS)
    (listed,) = answer_of(ring, "/api/tags").body["models"]
    assert listed["name"] == listed["model"] == "tiny:latest"
    assert (listed["size"], listed["digest"]) == (96_576_768, "abc")
    assert listed["modified_at"] == "2023-11-14T22:13:20.500000Z"
    assert listed["details"] == {
        "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "134.52M",
        "quantization_level": "Q4_1", "parent_model": "",
    }  # fmt: skip
    (loaded,) = answer_of(ring, "/api/ps").body["models"]
    assert (loaded["context_length"], loaded["size_vram"]) == (100, 0)
    for body in ({"model": "tiny"}, {"name": "tiny:latest"}):
        shown = answer_of(ring, "/api/show", body).body
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["llama.context_length"] == 100
        assert shown["model_info"]["llama.block_count"] == 30
        assert shown["model_info"]["general.parameter_count"] == 134_515_008
    assert refusal("/api/show", model="other")[0] == 404
    version = answer_of(ring, "/api/version").body["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize(
    ("method", "name"),
    [("POST", name) for name in ("pull", "push", "create", "copy")] + [("DELETE", "delete")],
)
async def test_what_is_not_offered_says_what_to_do(method: str, name: str) -> None:
    async with gateway_before(ScriptedRing([])) as (_, gateway):
        answer = await send(gateway, f"/api/{name}", {}, method)
    assert answer.status == 501 and f"/api/{name}: this server" in answer.body["error"]


async def test_clients_find_the_server_by_head() -> None:
    async with gateway_before(ScriptedRing([])) as (_, gateway):
        assert (await send(gateway, "/", None, "HEAD")).status == 200
