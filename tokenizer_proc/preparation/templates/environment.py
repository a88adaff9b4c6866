"""The Jinja environment that chat templates are written for.

Source: transformers.utils.chat_template_utils.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from quadriga.errors import ConfigError
from tokenizer_proc.preparation.templates.run_limits import TemplateRanAway, run_limited
from tokenizer_proc.preparation.templates.sandbox import BoundedSandbox, check_size

MAX_COMPILE_S = 5.0
# This is more than the messages and tools of a request can hold.
MAX_JSON_VALUES = 4_000_000


def compile_template(source: str, origin: Path) -> jinja2.Template:
    """Return a template in the sandbox. Raise ConfigError if it is no Jinja template."""
    try:
        return run_limited(lambda: _environment().from_string(source), MAX_COMPILE_S)
    except (jinja2.TemplateError, SyntaxError, RecursionError, TemplateRanAway) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the chat template cannot be read: {reason}; correct it in {origin}, or remove it to"
            " serve plain prompts only"
        ) from None


def _environment() -> jinja2.Environment:
    """Return the environment, with what Hugging Face's has beyond Jinja's own."""
    environment = BoundedSandbox(
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
    check_size(value, MAX_JSON_VALUES)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
