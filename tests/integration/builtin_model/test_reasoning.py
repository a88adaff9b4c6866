"""The built-in model answers after a reasoning that the server has closed."""

import json

import msgspec

from quadriga.client import Client, SamplingParams
from tests.server import Server

END = "\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 22, 333]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_the_model_answers_after_a_reasoning_that_is_closed(builtin_server: Server) -> None:
    wanted = SamplingParams(
        thinking_end=END, thinking_token_budget=12, temperature=0, max_new_tokens=60
    )
    in_json = msgspec.structs.replace(wanted, json_schema=SCHEMA)
    chat = [{"role": "user", "content": "How long should I stay in Oslo?"}]
    with Client(builtin_server.endpoint) as client:
        closing = client.tokenize(END)
        free, structured = client.generate(chat, wanted), client.generate(chat, in_json)
    assert len(closing) > 3, "the mark is ordinary text"
    for completion in (free, structured):
        assert completion.token_ids[12 : 12 + len(closing)] == closing
    assert free.text.split(END)[1]
    assert set(json.loads(structured.text.split(END)[1])) == {"city", "days"}
