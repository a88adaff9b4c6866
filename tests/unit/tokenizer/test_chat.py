"""Chats and tools become prompts, by the model's own template."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.wire.client import ChatMessage, ChatOptions
from tokenizer_proc.preparation.chat import ChatTemplate

WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ mood }}{% if add_generation_prompt %}>{% endif %}"
)


def template(directory: Path, source: str | None) -> ChatTemplate:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    return ChatTemplate(directory)


def test_tools_calls_answers_and_template_arguments_reach_the_template(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "", tool_calls=[call]),
        ChatMessage("tool", "sunny", name="weather", tool_call_id="1"),
    ]
    options = ChatOptions(tools=[{"name": "weather"}], template_args={"mood": "!"})
    rendered = template(tmp_path, WITH_TOOLS).render(messages, options)
    assert rendered == (
        '[{"name": "weather"}][user]Hi[assistant]<tool_call>{"city": "Rome"}[tool weather]sunny!>'
    )


def test_a_file_takes_the_place_of_the_models_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}")
    template(tmp_path, WITH_TOOLS)
    chat = ChatTemplate(tmp_path, tmp_path / "own.jinja")
    assert chat.render([ChatMessage("user", "Hi")], ChatOptions()) == "own Hi"


def test_every_named_token_is_a_variable_as_in_transformers(tmp_path: Path) -> None:
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "boi", "eoi", "video")
    source = " ".join(f"{{{{ {name}_token }}}}" for name in names)
    config = {
        "chat_template": source,
        **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "sep", "cls", "mask", "image")},
        "boi_token": {"__type": "AddedToken", "content": "<boi>", "lstrip": True},
        "extra_special_tokens": {"eoi_token": "<eoi>"},
        "pad_token": None,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert ChatTemplate(tmp_path).render([ChatMessage("user", "Hi")], ChatOptions()) == theirs
    assert theirs == "<bos> <eos>  <sep>  <cls> <mask> <image> <boi> <eoi> "


def test_template_arguments_may_replace_no_messages(tmp_path: Path) -> None:
    options = ChatOptions(template_args={"messages": [], "add_generation_prompt": False})
    assert template(tmp_path, WITH_TOOLS).render([ChatMessage("user", "Hi")], options) == "[user]Hi"


def test_a_template_that_breaks_on_what_it_is_given_is_the_clients_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        template(tmp_path, "{{ messages[0].content + 1 }}").render(
            [ChatMessage("user", "x")], ChatOptions()
        )


AS_IN_TRANSFORMERS = {
    "JSON with its options": "{{ value | tojson(ensure_ascii=true, indent=2) }}"
    "{{ value | tojson(separators=(',', ':'), sort_keys=true) }}{{ value | tojson(true, 1) }}",
    "JSON as it is": "{{ value | tojson }}{{ '<&>' | tojson }}{{ value | tojson(indent=4) }}",
    "what the assistant wrote, marked": "{% set x = 1 %}{% for m in messages %}\n"
    "  {% generation %}\n{{ m.content }}{{ loop.index }}{% set x = 2 %}{{ x }}\n"
    "  {% endgeneration %}\n{{ x }}{% endfor %}",
    "the same without white space": "a {%- generation -%} {{ messages[0].role }} "
    "{%- endgeneration -%} b",
    "a namespace and a dictionary": "{% set ns = namespace(self=1) %}{% generation %}"
    "{% set ns.found = dict(a=2) %}{% endgeneration %}{{ ns.found.a }}{{ ns.self }}"
    "{{ dict.fromkeys(['k'], 3) }}",
    "documents, which are none": "{{ documents is defined }}{{ documents }}{{ tools }}",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
    "{% endfor %}",
    "no way out of the sandbox": "{{ messages.__class__ }}{{ dict.mro }}{{ namespace.mro }}",
}


@pytest.mark.parametrize("source", AS_IN_TRANSFORMERS.values(), ids=AS_IN_TRANSFORMERS.keys())
def test_a_template_renders_as_with_transformers(tmp_path: Path, source: str) -> None:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "你好"}]
    value = {"b": ["ä", 1.5, None], "a": {"c": "<"}}
    expected = render(
        [turns], chat_template=source, add_generation_prompt=True, value=value, tools=None
    )
    messages = [ChatMessage(turn["role"], turn["content"]) for turn in turns]
    rendered = template(tmp_path, source).render(
        messages, ChatOptions(template_args={"value": value})
    )
    assert rendered == expected[0][0]


def test_the_date_in_a_template_is_todays(tmp_path: Path) -> None:
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    source = "{{ strftime_now('%Y-%m-%d') }}"
    expected = {render([[]], chat_template=source)[0][0]}
    rendered = template(tmp_path, source).render([], ChatOptions())
    expected |= {render([[]], chat_template=source)[0][0]}  # midnight may lie between
    assert rendered in expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ range(10 ** 6) }}",
        "{{ value | tojson }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception('no') }}",
        "{{ messages[3].content }}",
        "{{ messages.append(1) }}",
    ],
)
def test_every_error_in_a_template_refuses_the_request(tmp_path: Path, source: str) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match=r"chat template refused: .+"):
        template(tmp_path, source).render([], ChatOptions(template_args={"value": deep}))


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% unknown %}", "{{ x | no_such_filter }}", "{% break %}"]
)
def test_a_template_that_is_none_ends_the_start_with_its_reason(
    tmp_path: Path, source: str
) -> None:
    with pytest.raises(ConfigError, match=r"chat template cannot be read: .+; correct it"):
        template(tmp_path, source)
