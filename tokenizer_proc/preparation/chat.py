"""Render chats to prompts with the model's own template, in Jinja's sandbox."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.model_files.tokenizer import template_source
from quadriga.wire.messages.public import ChatMessage, ChatOptions

# The format in which a model writes tool calls is the first whose marker is in its template.
TOOL_FORMATS = (
    ("mistral", "[TOOL_CALLS]"),
    ("hermes", "<tool_call>"),
    ("llama3", '"parameters"'),
)
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The chat template of a tokenizer directory (tokenizer_config.json, chat_template.jinja).

    Args:
        tokenizer_dir: the directory; its special tokens are variables of the template.
        file: Jinja file in place of the directory's template; None: the directory's.

    Attributes:
        tool_format: a name of TOOL_FORMATS; "" if the template takes no tools.

    Raises:
        ConfigError: it is no Jinja template.
    """

    def __init__(self, tokenizer_dir: Path, file: Path | None = None) -> None:
        config = _read_config(tokenizer_dir / "tokenizer_config.json")
        self._tokens = {
            name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None
        }
        source = (
            template_source(tokenizer_dir, config)
            if file is None
            else file.read_text(encoding="utf-8")
        )
        self._template = None if source is None else _compile(source, file or tokenizer_dir)
        self.tool_format = _tool_format(source or "")

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        """Return the prompt that asks for the assistant's next turn. Raise InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "prompt is a chat, but this model has no chat template; send a plain string, or"
                " start the server with --chat-template",
                "prompt",
            )
        if options.tools and not self.tool_format:
            raise InvalidRequest(
                "tools are given, but this model's chat template takes none; leave them out",
                "tools",
            )
        variables = {
            "add_generation_prompt": True,
            "documents": None,
            **self._tokens,
            **options.template_args,
            "messages": [_as_template_value(message) for message in messages],
            "tools": options.tools or None,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # a template is a program: it may fail in any way
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the model's chat template refused: {reason}", "prompt") from None


def _as_template_value(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates know it: role, content, and other fields that are not empty."""
    value = {"role": message.role, "content": message.content}
    return value | {k: v for k, v in msgspec.structs.asdict(message).items() if v}


def _tool_format(source: str) -> str:
    """Return the format of tool calls; a template without a known marker has the most common."""
    if "tools" not in source:
        return ""
    return next((name for name, marker in TOOL_FORMATS if marker in source), "hermes")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _content(token: "str | dict[str, Any]") -> str:
    return token if isinstance(token, str) else str(token["content"])


def _compile(source: str, origin: Path) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the chat template cannot be read: {reason}; correct it in {origin}, or remove it to"
            " serve plain prompts only"
        ) from None


def _environment() -> jinja2.Environment:
    """Return the environment that Hugging Face chat templates are written for.

    Source: transformers.utils.chat_template_utils.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _DictFunctions()
    environment.globals["namespace"] = _Namespace
    return environment


class _DictFunctions:
    """Python's `dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without the attributes that lead to Python's own."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, *others = args  # so that a template may call an attribute "self"
        attributes = dict(*others, **fields)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace has no attribute {name!r}: choose a name without an underscore before it"
        )


class GenerationBlock(Extension):
    """{% generation %}...{% endgeneration %}, which marks the assistant's text for training.

    The text inside is rendered as if the tags were not there.
    """

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Return the statements inside, which are a scope of their own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, in place of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
