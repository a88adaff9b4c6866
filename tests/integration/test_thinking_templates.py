"""Budgets and grammars by HTTP, with the marks that the server reads off real chat templates."""

import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.gateway import running_gateway
from tests.server import running_server

TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures" / "chat_templates"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
IN_JSON = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
BUDGET = 10
CLOSING = ["\n", "</think>", "\n", "\n"]
ON, OFF = ({"chat_template_kwargs": {"enable_thinking": switch}} for switch in (True, False))


@contextmanager
def gateway_of(llama_dir: Path, template: str, directory: Path, **changes: Any) -> Iterator[str]:
    """Start a server of the tiny Llama with a template, in which the marks are tokens.

    `changes` replace values of its config.json. The context holds what random weights write: blanks
    in JSON, for some 40 tokens on average.
    """
    changes = {"max_position_embeddings": 1024, **changes}
    model = directory / "model"
    shutil.copytree(llama_dir, model)
    shutil.copyfile(TEMPLATES / template, model / "chat_template.jinja")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    marks = (AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>"))
    tokenizer.add_tokens(list(marks))
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    flags = ["--model", str(model), "--dtype", "float32", "--worker-threads", "1"]
    with (
        running_server(directory / "log", *flags) as server,
        running_gateway(server.endpoint, model) as url,
    ):
        yield url


def answer(url: str, **fields: Any) -> list[Any]:
    """Return the choices of a chat."""
    messages = [{"role": "user", "content": "Where?"}]
    body: dict[str, Any] = {"model": "tiny", "messages": messages}
    body |= {"max_tokens": 300, "logprobs": True, **fields}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        choices: list[Any] = json.load(response)["choices"]
    return choices


def ask(url: str, **fields: Any) -> list[tuple[str, list[str]]]:
    """Return the text and the tokens of each choice, the reasoning's tokens included."""
    return [
        (choice["message"]["content"], [item["token"] for item in choice["logprobs"]["content"]])
        for choice in answer(url, **fields)
    ]


def check_json(text: str) -> None:
    assert set(json.loads(text)) == {"city"}


def test_a_prompt_that_ends_in_the_reasoning_is_answered_with_reasoning(
    llama_dir: Path, tmp_path: Path
) -> None:
    with gateway_of(llama_dir, "qwq.jinja", tmp_path) as url:
        wanted: dict[str, Any] = {"thinking_token_budget": BUDGET, **ON}
        for text, tokens in ask(url, **wanted, response_format=IN_JSON, n=4):
            if "</think>" not in tokens[:BUDGET]:
                assert tokens[BUDGET : BUDGET + len(CLOSING)] == CLOSING
            check_json(text)
        ((_, tokens),) = ask(url, **wanted, ignore_eos=True, temperature=0, max_tokens=80)
        assert tokens[BUDGET : BUDGET + len(CLOSING)] == CLOSING
        assert len(tokens) == 80, "the answer goes on"
        ((text, tokens),) = ask(url, thinking_token_budget=0, response_format=IN_JSON, **ON)
        assert tokens[: len(CLOSING)] == CLOSING
        check_json(text)


def test_a_model_that_may_reason_does_or_answers_at_once(llama_dir: Path, tmp_path: Path) -> None:
    with gateway_of(llama_dir, "qwen3.jinja", tmp_path) as url:
        wanted: dict[str, Any] = {"thinking_token_budget": BUDGET, "response_format": IN_JSON}
        answers = ask(url, **wanted, n=16, seed=1)
        for text, tokens in answers:
            check_json(text)
            if tokens[0] == "<think>":
                assert "</think>" in tokens[: BUDGET + 4]
            else:
                assert "".join(tokens).startswith("{")
        assert {tokens[0] for _, tokens in answers} > {"<think>"}, "both kinds occur"
        for text, tokens in ask(url, **wanted, **OFF, n=4):
            check_json(text)
            assert tokens[0].startswith("{")


def test_a_forced_call_follows_the_reasoning(llama_dir: Path, tmp_path: Path) -> None:
    function = {"name": "visit", "parameters": SCHEMA}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    fields: dict[str, Any] = {**tools, **ON, "thinking_token_budget": BUDGET}
    fields |= {"parallel_tool_calls": False}
    with gateway_of(llama_dir, "qwq.jinja", tmp_path) as url:
        for choice in answer(url, **fields, n=3):
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "visit"
            check_json(call["function"]["arguments"])
            assert choice["message"]["reasoning_content"]
            assert choice["finish_reason"] == "tool_calls"


def test_a_budget_is_refused_where_the_template_marks_no_reasoning(
    llama_dir: Path, tmp_path: Path
) -> None:
    with (
        gateway_of(llama_dir, "qwen2.5.jinja", tmp_path) as url,
        pytest.raises(urllib.error.HTTPError) as refused,
    ):
        ask(url, thinking_token_budget=BUDGET)
    assert refused.value.code == 400
    assert "marks no reasoning" in refused.value.read().decode()
