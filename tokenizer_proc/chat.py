"""Chats become prompts by the model's own template, rendered in Jinja's sandbox."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quadriga.errors import InvalidRequest
from quadriga.messages.public import ChatMessage

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The chat template of a tokenizer directory (tokenizer_config.json, chat_template.jinja)."""

    def __init__(self, tokenizer_dir: Path) -> None:
        config = _read_config(tokenizer_dir / "tokenizer_config.json")
        self._tokens = {
            name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None
        }
        source = _template_source(tokenizer_dir, config)
        self._template = None if source is None else _environment().from_string(source)

    def render(self, messages: list[ChatMessage]) -> str:
        """The prompt that asks for the assistant's next turn. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "prompt is a chat, but this model has no chat template; send a plain string",
                "prompt",
            )
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=True,
                **self._tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refused: {error}", "prompt") from None


def _read_config(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _content(token: "str | dict[str, Any]") -> str:
    return token if isinstance(token, str) else str(token["content"])


def _template_source(tokenizer_dir: Path, config: dict[str, Any]) -> str | None:
    file = tokenizer_dir / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _environment() -> jinja2.Environment:
    """The environment that Hugging Face chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
