"""Render chats to prompts with the model's own template, in Jinja's sandbox."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from quadriga.errors import InvalidRequest
from quadriga.server.answer_format import KNOWN_FORMATS, AnswerFormat, CallFormat
from quadriga.server.config.frontend_args import AUTO
from quadriga.server.models.formats.directory import read_json, read_text
from quadriga.server.models.formats.tokenizer import (
    TOKENIZER_CONFIG,
    special_tokens,
    template_source,
    tool_template_source,
)
from quadriga.wire.client import ChatMessage, ChatOptions
from tokenizer_proc.preparation.templates.adapt import TemplateNeeds, find_needs, template_messages
from tokenizer_proc.preparation.templates.derive import (
    GENERIC,
    ParserNames,
    ResponseMarks,
    derive_format,
    overrule,
    read_response_template,
)
from tokenizer_proc.preparation.templates.probes import Prober
from tokenizer_proc.preparation.templates.sandbox import (
    TemplateRanAway,
    compile_template,
    join_limited,
    run_limited,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A template renders a short chat in about a millisecond. Long chats have their time, because some
# templates look at all turns for each turn.
MIN_CPU_S = 0.5
ITEM_CPU_S = 0.01
MEGABYTE_CPU_S = 2.0
PROBE_CPU_S = 0.2
# A longer prompt is refused by the encoder.
MAX_TEXT_CHARS = 8 * 1024 * 1024
# The form of calls in chats of models whose answers have no calls.
DEFAULT_FORM = cast(CallFormat, KNOWN_FORMATS[GENERIC].calls)
SHOWS_NO_CALLS = (
    "the chat template takes tools, but does not show how the model writes calls: they are read as"
    " hermes; choose another form with --tool-call-parser"
)
RUNS_AWAY = (
    "the chat template takes too much time or memory for a chat of one message: chats will be"
    " refused; correct it, or replace it with --chat-template"
)
# Stands after the last message while a chat is rendered whose last message goes on, as in
# transformers.
_CONTINUED_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class TokenMarks(NamedTuple):
    """Tokens of a vocabulary that matter for the marks of answers.

    Attributes:
        ends: the texts of tokens that end a text.
        special: the texts of special tokens, which leave no text unless asked for.
    """

    ends: tuple[str, ...] = ()
    special: frozenset[str] = frozenset()


def token_marks(tokenizer: "Tokenizer", eos_token_ids: frozenset[int]) -> TokenMarks:
    """Return the tokens of a tokenizer that end texts, and its special tokens."""
    ends = (tokenizer.id_to_token(id_) for id_ in sorted(eos_token_ids))
    added = tokenizer.get_added_tokens_decoder().values()
    return TokenMarks(
        tuple(text for text in ends if text),
        frozenset(token.content for token in added if token.special),
    )


class ChatTemplate:
    """The chat template of a tokenizer directory (tokenizer_config.json, chat_template.jinja).

    Args:
        tokenizer_dir: the directory; its special tokens are variables of the template.
        file: Jinja file in place of the directory's template; None: the directory's.
        marks: tokens of the model's vocabulary; None: they are not known.
        parsers: the formats that the server's flags choose; None: as the template shows.

    Attributes:
        answer_format: how the model writes its answers.
        notes: what the start of the server says about the template.

    Raises:
        ConfigError: it is no Jinja template.
    """

    def __init__(
        self,
        tokenizer_dir: Path,
        file: Path | None = None,
        marks: TokenMarks | None = None,
        parsers: ParserNames | None = None,
    ) -> None:
        config = read_json(tokenizer_dir / TOKENIZER_CONFIG)
        self._tokens = special_tokens(tokenizer_dir).texts
        if file is None:
            source = template_source(tokenizer_dir, config)
            tool_source = tool_template_source(tokenizer_dir, config)
            given = read_response_template(config)
        else:
            source, tool_source = read_text(file), None
            given = ResponseMarks()
        origin = file or tokenizer_dir
        self._template = None if source is None else compile_template(source, origin)
        self._tool_template = None if tool_source is None else compile_template(tool_source, origin)
        self._needs = TemplateNeeds()
        self._call_form = DEFAULT_FORM
        self.answer_format = AnswerFormat()
        self.notes: tuple[str, ...] = ()
        if source is not None:
            sources = source + (tool_source or "")
            self._probe(sources, marks or TokenMarks(), given, parsers or ParserNames())

    def _probe(
        self, source: str, marks: TokenMarks, given: ResponseMarks, parsers: ParserNames
    ) -> None:
        prober = Prober(self._render)
        needs = find_needs(prober)
        derived, has_calls = derive_format(prober, source, needs, marks.ends, marks.special, given)
        if not (needs.takes_tools or (needs.takes_calls and has_calls)):
            needs = replace(needs, takes_calls=False, takes_results=False)
        self._needs = needs
        self.answer_format = overrule(derived, parsers, marks.special)
        self._call_form = self.answer_format.calls or DEFAULT_FORM
        if prober.has_run_away:
            self.notes += (RUNS_AWAY,)
        if not (has_calls or not needs.takes_tools or parsers.tool_call != AUTO):
            self.notes += (SHOWS_NO_CALLS,)

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        """Return the prompt that asks for the assistant's next turn.

        Tools that the template does not take are described in the system message. With
        `continue_final_message` the prompt ends with the text of the last message.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the chat.
        """
        if self._template is None:
            raise InvalidRequest(
                "prompt is a chat, but this model has no chat template; send a plain string, or"
                " start the server with --chat-template",
                "prompt",
            )
        values = template_messages(messages, options.tools, self._needs, self._call_form)
        if options.continue_final_message:
            _check_continues(messages, options)
            values[-1] = values[-1] | {"content": values[-1]["content"] + _CONTINUED_HERE}
        variables = {
            "add_generation_prompt": options.add_generation_prompt,
            **options.template_args,
            "messages": values,
            "tools": (self._needs.takes_tools and options.tools) or None,
        }
        try:
            text = self._render(variables, _max_cpu_s(messages, options))
        except TemplateRanAway as error:
            raise InvalidRequest(
                f"the model's chat template ran away: {error}; shorten the chat, or start the"
                " server with another --chat-template",
                "prompt",
            ) from None
        except Exception as error:  # a template is a program: it may fail in any way
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the model's chat template refused: {reason}", "prompt") from None
        return _cut_where_continued(text) if options.continue_final_message else text

    def _render(self, variables: dict[str, Any], max_cpu_s: float = PROBE_CPU_S) -> str:
        has_tools = self._tool_template is not None and variables["tools"]
        template = self._tool_template if has_tools else self._template
        assert template is not None
        pieces = template.generate({"documents": None, **self._tokens, **variables})
        return run_limited(lambda: join_limited(pieces, MAX_TEXT_CHARS), max_cpu_s)


def _max_cpu_s(messages: list[ChatMessage], options: ChatOptions) -> float:
    """Return the CPU time in which a template renders a chat, by a generous measure."""
    num_bytes = len(msgspec.json.encode((messages, options)))
    num_items = len(messages) + len(options.tools)
    return MIN_CPU_S + ITEM_CPU_S * num_items + MEGABYTE_CPU_S * num_bytes / 2**20


def _check_continues(messages: list[ChatMessage], options: ChatOptions) -> None:
    if options.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: the answer either"
            " continues the last message or begins a new one; set one of them to false",
            "continue_final_message",
        )
    if messages[-1].role != "assistant":
        raise InvalidRequest(
            f"continue_final_message is true, but the role of the last message is"
            f" {messages[-1].role!r}; end the chat with an assistant's message",
            "continue_final_message",
        )


def _cut_where_continued(text: str) -> str:
    """Return a prompt up to the end of the last message's text."""
    place = text.rfind(_CONTINUED_HERE.strip())
    if place < 0:
        raise InvalidRequest(
            "continue_final_message is true, but the model's chat template does not write the last"
            " message as it is; leave out continue_final_message",
            "continue_final_message",
        )
    keeps_spaces = text.startswith(_CONTINUED_HERE, place)
    return text[:place] if keeps_spaces else text[:place].rstrip()
