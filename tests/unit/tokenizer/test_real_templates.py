"""Templates of real models: rendered as transformers renders them, and their marks found."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jinja2 import TemplateError

from quadriga.errors import InvalidRequest
from quadriga.server.answer_format import KNOWN_FORMATS
from quadriga.wire.client import ChatMessage, ChatOptions
from tests.unit.tokenizer.real_templates import DIRECTORY, ENDS, FILES, TOKENS, WITHOUT_TOOLS
from tokenizer_proc.preparation.chat import ChatTemplate, TokenMarks
from tokenizer_proc.preparation.templates.derive import DERIVED, GENERIC_SOURCE


class Derived(NamedTuple):
    """What a template shows of its model's answers."""

    source: str
    reasoning: tuple[str, str] | None = None
    switch: str = ""
    is_default: bool = True


THINK = ("<think>", "</think>")
EXPECTED = {
    "apertus": Derived(
        "apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), "enable_thinking", False
    ),
    "deepseek-v3.1": Derived("deepseek_v31", THINK, "enable_thinking", False),
    "gemma-4": Derived("gemma4", ("<|channel>thought", "<channel|>"), "enable_thinking", False),
    "glm-4.6": Derived("glm45", THINK, "enable_thinking"),
    "gpt-oss": Derived("harmony", ("<|channel|>analysis<|message|>", "<|end|>")),
    "granite-3.3": Derived("granite", THINK, "thinking", False),
    "granite-4.0": Derived("hermes"),
    "minimax-m2": Derived("minimax_m2", THINK),
    "ministral-3-reasoning": Derived("mistral", ("[THINK]", "[/THINK]")),
    "mistral-nemo": Derived(DERIVED),
    "mistral-small-3.2": Derived("mistral"),
    "phi-3.5-mini": Derived(GENERIC_SOURCE),
    "qwen2.5": Derived("hermes"),
    "qwen3": Derived("hermes", THINK, "enable_thinking"),
    "qwen3-coder": Derived("qwen3_coder"),
    "qwq": Derived("hermes", THINK, "enable_thinking", False),
    "seed-oss": Derived("seed_oss", ("<seed:think>", "</seed:think>")),
    "smollm3": Derived(GENERIC_SOURCE, THINK, "enable_thinking"),
}


@cache
def chat_template(file: Path) -> ChatTemplate:
    return ChatTemplate(_Directory.path(), file, TokenMarks(ENDS))


class _Directory:
    """A tokenizer directory that all tests of this file share."""

    _path: Path | None = None

    @classmethod
    def path(cls) -> Path:
        assert cls._path is not None
        return cls._path


@pytest.fixture(autouse=True, scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    _Directory._path = directory


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city."},
                "days": {"type": "integer", "description": "Days from now."},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcDEF123",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
AS_TEXT = {
    "role": "assistant",
    "content": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 2}}]',
}
RESULT = {"role": "tool", "content": "17 °C", "name": "weather", "tool_call_id": "abcDEF123"}
THINKING = {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."}
CHATS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a question": ([HELLO], False),
    "a system message": ([SYSTEM, HELLO], False),
    "several turns": ([HELLO, ANSWER, HELLO], False),
    "tools": ([HELLO], True),
    "tools and a system message": ([SYSTEM, HELLO], True),
    "a call and its result": ([HELLO, CALLING, RESULT], True),
    "an answer after a call": ([HELLO, CALLING, RESULT, ANSWER, HELLO], True),
    "reasoning": ([HELLO, THINKING, HELLO], False),
    "reasoning at the end": ([HELLO, THINKING], False),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
def test_a_real_template_renders_as_with_transformers(
    file: Path, chat: tuple[list[dict[str, Any]], bool]
) -> None:
    turns, has_tools = chat
    options = ChatOptions(tools=[WEATHER] if has_tools else [])
    messages = [ChatMessage(**turn) for turn in turns]
    if has_tools and file.stem in WITHOUT_TOOLS:
        prompt = chat_template(file).render(messages, options)
        assert '{"name": "weather", "description"' in prompt
        assert ("17 °C" in prompt) == (RESULT in turns)
        return
    if file.stem == "granite-3.3":  # it would drop the calls: they are given to it as text
        turns = [AS_TEXT if turn is CALLING else turn for turn in turns]
    expected = rendered_by_transformers(file, turns, options.tools)
    if expected is None:
        with pytest.raises(InvalidRequest, match="chat template refused"):
            chat_template(file).render(messages, options)
    else:
        assert chat_template(file).render(messages, options) == expected


def rendered_by_transformers(
    file: Path, turns: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> str | None:
    """Return the prompt that transformers makes of a chat; None if the template refuses it."""
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    try:
        prompts, _ = render(
            [turns],
            tools=tools or None,
            chat_template=file.read_text(),
            add_generation_prompt=True,
            **TOKENS,
        )
    except TemplateError:
        return None
    return str(prompts[0])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_marks_of_a_real_template_are_found(file: Path) -> None:
    found = chat_template(file).answer_format
    reasoning = found.reasoning
    derived = (
        Derived(found.source)
        if reasoning is None
        else Derived(
            found.source, (reasoning.open, reasoning.close), reasoning.switch, reasoning.is_default
        )
    )
    assert derived == EXPECTED[file.stem]
    if found.source in KNOWN_FORMATS:
        assert found.calls == KNOWN_FORMATS[found.source].calls
    assert chat_template(file).notes == ()


def test_the_table_names_every_template() -> None:
    readme = (DIRECTORY / "README.md").read_text()
    assert {file.stem for file in FILES} == EXPECTED.keys()
    assert all(f"`{file.name}`" in readme for file in FILES)
