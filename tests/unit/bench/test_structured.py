"""Schemas of the structured bench, and the validation of answers."""

import asyncio
import json
from typing import Any, cast

import pytest

from bench import structured
from bench.structured import complaint, schemas
from quadriga.client import Completion, SamplingParams, Timings
from quadriga.errors import ConfigError
from quadriga.wire.client import Usage

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def answer(text: str, tokens: int = 10, reason: str = "stop") -> Completion:
    timings = Timings(0.0, received=1.0, first_token=1.5)
    return Completion("r", text, [], reason, Usage(5, tokens), timings)


class FakeClient:
    """A client whose every fourth answer violates its schema."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.running = self.most = 0

    async def info(self) -> dict[str, Any]:
        return {"steps": len(self.prompts)}

    async def generate(self, prompt: Any, params: SamplingParams) -> Completion:
        self.prompts.append(json.dumps(prompt))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if params.json_schema is None:
            assert params.ignore_eos and params.max_new_tokens == 7
            return answer("whatever", 7, "length")
        wrong = params.seed is not None and params.seed % 4 == 3
        return answer('{"a": "no"}' if wrong else "{}", 7)


def test_schemas_differ_and_are_drawn_by_the_seed() -> None:
    made = schemas(50, 0)
    assert len({json.dumps(schema) for schema in made}) == 50
    assert made == schemas(50, 0) and made != schemas(50, 1)


@pytest.mark.parametrize(
    ("text", "reason", "wrong"),
    [
        ('{"a": 1}', "stop", ""),
        ('{"a": "x"}', "stop", "is not of type 'integer'"),
        ("{", "stop", "Expecting property name"),
        ('{"a": 1', "length", "10 tokens, ended by length"),
    ],
)
def test_an_answer_is_judged_by_its_schema(text: str, reason: str, wrong: str) -> None:
    found = complaint(SCHEMA, answer(text, reason=reason))
    assert wrong in found and bool(found) == bool(wrong)


def test_every_request_is_sent_with_and_without_its_schema_and_no_prompt_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structured, "schemas", lambda count, seed: [SCHEMA] * count)
    arguments = structured._parse(["--num-requests", "8", "--num-schemas", "2", "--turns", "2"])
    load, client = structured.Load(8, 3), cast(Any, FakeClient())
    asyncio.run(structured.measure(client, arguments, structured.Load(5, 1)))
    turns, complaints = asyncio.run(structured.measure(client, arguments, load, first=5))
    assert len(client.prompts) == len(set(client.prompts)) == 2 * (13 + 2 * structured.NUM_WARM_UP)
    assert client.most == 3 and [len(of) for of in turns.results.values()] == [2, 2]
    assert len(complaints) == 8, "no answer has the field of the schema"
    info = dict.fromkeys(("model", "dtype", "device", "attention_backend"), "x")
    lines = structured.text_of(arguments, load, info, turns, complaints).splitlines()
    assert "Valid answers: 0 of 8" in lines
    assert "| steps of a turn | 4 | 4 |" in lines
    assert capsys.readouterr().err.count("with schemas") == 4
    row = structured.row_of(load, turns, complaints)
    assert row["streams"] == 3 and row["valid"] == "0 of 8" and row["tokens of an answer"] == 7


def test_loads_have_a_number_of_requests_and_one_of_streams() -> None:
    arguments = structured._parse(["--num-requests", "8", "64", "--concurrency", "1", "16"])
    assert arguments.loads == [structured.Load(8, 1), structured.Load(64, 16)]
    for flags in (["--concurrency", "1", "16"], ["--concurrency", "0"]):
        with pytest.raises(ConfigError, match="each load has a number of both"):
            structured._parse(flags)
