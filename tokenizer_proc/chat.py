"""Chats become prompts by the model's own template, rendered in Jinja's sandbox."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quadriga.errors import InvalidRequest
from quadriga.messages.public import ChatMessage, ChatOptions

TOOL_FORMATS = (
    ("mistral", "[TOOL_CALLS]"),
    ("hermes", "<tool_call>"),
    ("llama3", '"parameters"'),
)
"""How a model writes a tool call, and what betrays it in its template; the first that is found."""
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
        self.tool_format = _tool_format(source or "")

    @property
    def exists(self) -> bool:
        return self._template is not None

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        """The prompt that asks for the assistant's next turn. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "prompt is a chat, but this model has no chat template; send a plain string",
                "prompt",
            )
        if options.tools and not self.tool_format:
            raise InvalidRequest(
                "tools are given, but this model's chat template takes none; leave them out",
                "tools",
            )
        variables = {"add_generation_prompt": True, **self._tokens, **options.template_args}
        try:
            return self._template.render(
                messages=[_turn(message) for message in messages],
                tools=options.tools or None,
                **{k: v for k, v in variables.items() if k not in ("messages", "tools")},
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"the model's chat template refused: {error}", "prompt") from None


def _turn(message: ChatMessage) -> dict[str, Any]:
    """As templates know a turn: role and content always, the rest where it says something."""
    turn = {"role": message.role, "content": message.content}
    return turn | {k: v for k, v in msgspec.structs.asdict(message).items() if v}


def _tool_format(source: str) -> str:
    """How the model writes tool calls; "" where its template takes no tools. A template that
    shows no format that we know is taken for the commonest."""
    if "tools" not in source:
        return ""
    return next((name for name, sign in TOOL_FORMATS if sign in source), "hermes")


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
