"""Texts begin with the token that the tokenizer adds to them; chats are as the template writes."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from quadriga.wire.messages.public import ChatMessage, ChatOptions
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.encode import Encoder

BOS, EOS, A, B = range(4)


def encoder(directory: Path, template: str | None) -> Encoder:
    """Return an encoder of the words a and b, with a post-processor's template."""
    vocabulary = {"<bos>": BOS, "<eos>": EOS, "a": A, "b": B}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("<eos>")])
    if template:
        tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    jinja = directory / "chat.jinja"
    jinja.write_text("<bos>{{ messages[0]['content'] }}")
    (directory / "tokenizer_config.json").write_text("{}")
    return Encoder(tokenizer, ChatTemplate(directory, jinja))


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
    assert list(encoder(tmp_path, template).encode("a b", ChatOptions())) == expected


def test_a_text_that_begins_with_the_token_gets_no_second_one(tmp_path: Path) -> None:
    ours = encoder(tmp_path, "<bos> $A")
    assert list(ours.encode("<bos> a", ChatOptions())) == [BOS, A]
    assert list(ours.encode("", ChatOptions())) == []


def test_a_chat_is_encoded_as_its_template_writes_it(tmp_path: Path) -> None:
    ours = encoder(tmp_path, "<bos> $A")
    chat = [ChatMessage("user", " a")]
    assert list(ours.encode(chat, ChatOptions())) == [BOS, A]
