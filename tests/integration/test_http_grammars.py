"""Grammars for OpenAI's clients."""

import re
from typing import Any

import openai
import pytest

from tests.gateway import MODEL
from tests.integration.schemas import SCHEMA, check_schema


def test_openais_clients_have_response_format_and_the_other_grammars(gateway: str) -> None:
    client = openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=30)
    messages: Any = [{"role": "user", "content": "Hello!"}]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    chat: Any = {"model": MODEL, "messages": messages, "seed": 3}
    answer = client.chat.completions.create(**chat, response_format=wanted)
    check_schema(answer.choices[0].message.content or "")
    parts = client.chat.completions.create(**chat, response_format=wanted, stream=True)
    check_schema("".join(part.choices[0].delta.content or "" for part in parts))
    any_object: Any = {"type": "json_object"}
    answer = client.chat.completions.create(**chat, response_format=any_object, max_tokens=5)
    assert (answer.choices[0].message.content or "").startswith("{")
    digits = client.completions.create(
        model=MODEL, prompt="One", seed=3, extra_body={"regex": r"\d{1,3}"}
    )
    assert re.fullmatch(r"\d{1,3}", digits.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="unclosed group") as refused:
        client.completions.create(model=MODEL, prompt="One", extra_body={"regex": "a("})
    assert refused.value.param == "regex"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{"),
        ({"guided_regex": r"\d{2}"}, r"\d{2}$"),
        ({"guided_choice": ["yes", "no"]}, "(yes|no)$"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "[ab]$"),
        ({"guided_json": {"const": 5}}, "5$"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5$"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "(yes|no)$"),
        ({"structured_outputs": {"json_object": True}}, r"\{"),
    ],
)
def test_vllms_and_openais_names_of_grammars(gateway: str, fields: Any, pattern: str) -> None:
    client = openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=30)
    answer = client.completions.create(
        model=MODEL, prompt="One", seed=3, max_tokens=8, extra_body=fields
    )
    assert re.match(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"guided_regex": "a", "regex": "b"}, "the same field"),
        ({"regex": "b", "response_format": {"type": "json_object"}}, "both given"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one grammar"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "whitespace_pattern"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "at least one structure"),
    ],
)
def test_grammars_that_contradict_are_refused(gateway: str, fields: Any, said: str) -> None:
    client = openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=30)
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(model=MODEL, prompt="One", extra_body=fields)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"not": {}},
        {"enum": []},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/nowhere"},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "string", "maxLength": 10**30},
        "false", "[" * 100_000, "{", "",
    ],
    ids=lambda schema: str(schema)[:40],
)  # fmt: skip
def test_a_schema_that_no_text_obeys_is_a_400(gateway: str, schema: Any) -> None:
    client = openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=30)
    with pytest.raises(openai.BadRequestError, match=r"json_schema|cannot be encoded") as refused:
        client.completions.create(
            model=MODEL, prompt="One", extra_body={"json_schema": schema}, max_tokens=20
        )
    assert refused.value.param in ("json_schema", None)
    wanted: Any = {"name": "s", "schema": schema, "strict": True}
    fields: Any = {"response_format": {"type": "json_schema", "json_schema": wanted}}
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="One", extra_body=fields, max_tokens=20)
    wanted["strict"] = False
    if isinstance(schema, dict):
        client.completions.create(model=MODEL, prompt="One", extra_body=fields, max_tokens=20)
