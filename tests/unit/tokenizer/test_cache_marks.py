"""Hints that name a message: how many tokens of the prompt are before its end."""

import json
from array import array
from pathlib import Path

import pytest

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.cache import CacheHint
from quadriga.wire.client import ChatMessage, ChatOptions, Generate
from quadriga.wire.packing import pack_ids, unpack_ids
from tests.unit.tokenizer.real_templates import FILES, TOKENS
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.prepare import Preparer

VOCABULARY = 0x110000
# Writes the system prompt with the user's last message.
WITH_LATE_SYSTEM_PROMPT = ("mistral-nemo",)
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "", "parameters": PARAMETERS},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer directory."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    return path


class CharEncoder:
    """Writes chats with a real template; a token is a character."""

    takes_chats = True

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def render(self, prompt: str | list[ChatMessage], chat: ChatOptions) -> str:
        return prompt if isinstance(prompt, str) else self._template.render(prompt, chat)

    def encode(self, text: str, is_chat: bool) -> "array[int]":
        return array("i", map(ord, text))


def prompt_and_kept(
    template: ChatTemplate, chat: list[ChatMessage], hint: CacheHint, context: int = 100_000
) -> tuple[str, int]:
    """Return the prompt of a chat as it runs, and the number of its tokens that are kept."""
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": context}
    model = ModelFiles("m", "m", config, {}, Path(), None)
    preparer = Preparer(FrontendArgs(), model, CharEncoder(template))  # type: ignore[arg-type]
    message = Generate(
        1, "r", chat, SamplingParams(max_new_tokens=1), truncate_prompt=True,
        chat=ChatOptions([TOOL]), cache=hint,
    )  # fmt: skip
    request = preparer.prepare(message).request
    assert request.cache is not None and request.prompt_token_ids is not None
    assert (request.cache.num_messages, request.cache.num_chars) == (0, None)
    assert (request.cache.key, request.cache.ttl_s) == (hint.key, hint.ttl_s)
    return "".join(map(chr, unpack_ids(request.prompt_token_ids))), request.cache.num_tokens


def chat_of(task: str, *later: str) -> list[ChatMessage]:
    turns = [ChatMessage("system", "You are an agent."), ChatMessage("user", task)]
    for number, text in enumerate(later):
        turns.append(ChatMessage("assistant" if number % 2 == 0 else "user", text))
    return turns


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_kept_ends_where_the_marked_text_ends(file: Path, directory: Path) -> None:
    template = ChatTemplate(directory, file)
    chat = chat_of("Read the file. Then stop.", "I have read it.", "Now the other one.")
    other = chat_of("Read the file. Then stop.", "No.", "Why?")
    marked = {
        "system": CacheHint("k", 60.0, num_messages=1),
        "before the first message": CacheHint("k", 60.0, num_messages=2, num_chars=0),
        "within a text": CacheHint("k", 60.0, num_messages=2, num_chars=len("Read the file.")),
        "message": CacheHint("k", 60.0, num_messages=2),
    }
    ends = {
        "system": "You are an agent.", "before the first message": "",
        "within a text": "Read the file.", "message": "Read the file. Then stop.",
    }  # fmt: skip
    counts = []
    for name, hint in marked.items():
        if name == "system" and file.stem in WITH_LATE_SYSTEM_PROMPT:
            continue
        prompt, num_kept = prompt_and_kept(template, chat, hint)
        assert 0 < num_kept < len(prompt), name
        assert prompt[:num_kept].endswith(ends[name]), name
        again, _ = prompt_and_kept(template, other, hint)
        assert again.startswith(prompt[:num_kept]), f"{name}: another chat can use what is kept"
        counts.append(num_kept)
    assert counts == sorted(counts)


@pytest.mark.parametrize("file", FILES[:3], ids=lambda file: file.stem)
def test_a_mark_at_the_end_keeps_the_whole_prompt_and_the_answer(
    file: Path, directory: Path
) -> None:
    chat = chat_of("Read the file.")
    for hint in (CacheHint(num_messages=2), CacheHint(num_messages=9), CacheHint()):
        assert prompt_and_kept(ChatTemplate(directory, file), chat, hint)[1] == 0


def test_a_prompt_that_was_cut_is_kept_as_a_whole(directory: Path) -> None:
    chat = chat_of("Read the file. " * 40, "No.", "Why?")
    hint = CacheHint(num_messages=2)
    prompt, num_kept = prompt_and_kept(ChatTemplate(directory, FILES[0]), chat, hint, 300)
    assert len(prompt) < 300
    assert num_kept == 0


def test_a_message_that_the_template_does_not_write_keeps_the_whole_prompt(tmp_path: Path) -> None:
    jinja = tmp_path / "chat.jinja"
    jinja.write_text("{{ messages[-1]['content'] }}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    chat = chat_of("Read the file.", "No.", "Why?")
    _, num_kept = prompt_and_kept(ChatTemplate(tmp_path, jinja), chat, CacheHint(num_messages=1))
    assert num_kept == 0


def prepared(message: Generate, directory: Path) -> CacheHint | None:
    config = {"vocab_size": 10, "max_position_embeddings": 64}
    model = ModelFiles("m", "m", config, {}, Path(), None)
    encoder = CharEncoder(ChatTemplate(directory, FILES[0]))
    return Preparer(FrontendArgs(), model, encoder).prepare(message).request.cache  # type: ignore[arg-type]


def test_token_ids_are_kept_up_to_a_number_of_them(directory: Path) -> None:
    for num_tokens, expected in ((2, 2), (4, 0), (9, 0), (0, 0)):
        hint = CacheHint("", 5.0, num_tokens)
        ids = pack_ids(array("i", [1, 2, 3, 4]))
        found = prepared(Generate(1, "r", "", prompt_token_ids=ids, cache=hint), directory)
        assert found == CacheHint("", 5.0, expected)


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("num_tokens", CacheHint(num_tokens=-1)),
        ("num_messages", CacheHint(num_messages=-1)),
        ("num_chars", CacheHint(num_chars=-1)),
    ],
)
def test_a_negative_number_is_refused_by_name(field: str, hint: CacheHint, directory: Path) -> None:
    ids = pack_ids(array("i", [1]))
    message = Generate(1, "r", "", prompt_token_ids=ids, cache=hint)
    with pytest.raises(InvalidRequest, match=rf"cache\.{field} is -1"):
        prepared(message, directory)
