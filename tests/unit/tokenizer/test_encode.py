"""Texts begin with the token that the tokenizer adds to them; chats are as the template writes."""

from pathlib import Path
from typing import cast

import pytest

from quadriga.sampling.params import SamplingParams
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.client import ChatMessage, ChatOptions, Generate, Tokenize, Tokens
from quadriga.wire.packing import pack_ids
from tests.unit.tokenizer.frontend_world import BOS, EOS, A, B, encoder
from tokenizer_proc.preparation.prepare import Prepared, Preparer


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, [A, B]),
        ("$A", [A, B]),
        ("<bos> $A", [BOS, A, B]),
        ("$A <eos>", [A, B]),
        ("<bos> $A <eos>", [BOS, A, B]),
    ],
)
def test_a_text_begins_as_the_tokenizer_says_and_has_no_end(
    tmp_path: Path, template: str | None, expected: list[int]
) -> None:
    assert list(encoder(tmp_path, template).encode("a b", False)) == expected


def test_a_text_that_begins_with_the_token_gets_no_second_one(tmp_path: Path) -> None:
    ours = encoder(tmp_path, "<bos> $A")
    assert list(ours.encode("<bos> a", False)) == [BOS, A]
    assert list(ours.encode("", False)) == []


def test_a_chat_is_encoded_as_its_template_writes_it(tmp_path: Path) -> None:
    ours = encoder(tmp_path, "<bos> $A")
    chat = [ChatMessage("user", " a")]
    assert list(ours.encode(ours.render(chat, ChatOptions()), True)) == [BOS, A]


def prepare(directory: Path, message: Generate | Tokenize) -> Prepared | Tokens:
    """Return what a message becomes; the chat template writes "<bos>" and the first content."""
    config = {"vocab_size": 4, "max_position_embeddings": 4096, "eos_token_id": EOS}
    model = ModelFiles("m", "m", config, {}, directory, None)
    preparer = Preparer(FrontendArgs(), model, encoder(directory, "<bos> $A"))
    outcome = preparer.prepare(message) if isinstance(message, Generate) else None
    return outcome or cast(Tokens, preparer.convert(cast(Tokenize, message)))


def test_the_end_of_a_chats_prompt_is_kept(tmp_path: Path) -> None:
    chat = [ChatMessage("user", "b " * 200 + "a")]
    prepared = cast(Prepared, prepare(tmp_path, Generate(1, "1", chat)))
    assert prepared.prompt_end == ("b " * 200 + "a")[-256:]
    text = cast(Prepared, prepare(tmp_path, Generate(1, "1", "a b")))
    assert text.prompt_end == ""


def continues(directory: Path, message: Generate) -> bool | None:
    return cast(Prepared, prepare(directory, message)).request.params.continues_prompt


def test_an_answer_continues_the_prompt_unless_it_is_a_new_turn_of_a_chat(tmp_path: Path) -> None:
    chat = [ChatMessage("user", "a")]
    assert continues(tmp_path, Generate(1, "1", "a b"))
    assert continues(tmp_path, Generate(1, "1", "", prompt_token_ids=pack_ids([A])))
    assert not continues(tmp_path, Generate(1, "1", chat))
    open_chat = Generate(1, "1", chat, chat=ChatOptions(add_generation_prompt=False))
    assert continues(tmp_path, open_chat)
    begun = ChatOptions(continue_final_message=True, add_generation_prompt=False)
    assert continues(tmp_path, Generate(1, "1", [ChatMessage("assistant", "a")], chat=begun))
    own = SamplingParams(continues_prompt=False)
    assert continues(tmp_path, Generate(1, "1", "a b", own)) is False
    assert continues(tmp_path, Generate(1, "1", chat, SamplingParams(continues_prompt=True)))


def test_the_answer_to_a_grammar_keeps_the_first_space_that_the_grammar_has(tmp_path: Path) -> None:
    chat = [ChatMessage("user", "a")]
    assert continues(tmp_path, Generate(1, "1", chat, SamplingParams(choice=[" Paris."])))
    tagged = SamplingParams(structural_tag='{"format": {"type": "any_text"}}')
    assert not continues(tmp_path, Generate(1, "1", chat, tagged))
    reasons = SamplingParams(choice=[" Paris."], thinking_end="</think>")
    assert not continues(tmp_path, Generate(1, "1", chat, reasons))


def test_the_text_of_a_prompt_is_sent_where_it_is_asked_for(tmp_path: Path) -> None:
    chat = [ChatMessage("user", "a")]
    tokens = prepare(tmp_path, Tokenize(1, "1", chat, with_text=True))
    assert tokens == Tokens("1", pack_ids([BOS, A]), "<bos>a")
    assert prepare(tmp_path, Tokenize(1, "1", chat)) == Tokens("1", pack_ids([BOS, A]))
