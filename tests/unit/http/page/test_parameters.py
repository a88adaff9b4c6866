"""The settings of the page's chat have every sampling field of the API."""

import json
from typing import Any

from http_proc.generation.sampling import CHAT
from http_proc.generation.schema import ChatRequest
from quadriga.sampling.params import GRAMMAR_FIELDS
from tests.unit.http.page.test_bundle import SOURCE

CHAT_SOURCE = SOURCE / "views" / "chat"


def fields() -> list[dict[str, Any]]:
    groups = json.loads((CHAT_SOURCE / "parameters.json").read_bytes())
    return [field for group in groups for field in group["fields"]]


def test_every_sampling_field_can_be_set() -> None:
    shown = {CHAT[field["name"]] for field in fields() if field["name"] in CHAT} | {"n"}
    assert set(CHAT.values()) - shown == set(GRAMMAR_FIELDS)


def test_every_grammar_can_be_chosen() -> None:
    text = (CHAT_SOURCE / "model" / "grammars.js").read_text()
    assert not [name for name in GRAMMAR_FIELDS if f'name: "{name}"' not in text]


def test_every_field_of_the_page_is_one_of_the_api() -> None:
    known = {*CHAT, *ChatRequest.__struct_fields__}
    assert not [field["name"] for field in fields() if field["name"] not in known]
