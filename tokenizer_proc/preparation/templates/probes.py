"""Probes of a chat template: chats with known words, whose places in the prompt show the marks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizer_proc.preparation.templates.run_limits import TemplateRanAway

USER = "Quprobe?"
CONTENT = "Conprobe."
REASONING = "Reaprobe."
NAMES = ("nprobea", "nprobeb")
KEYS = ("kprobea", "kprobeb")
VALUES = ("Vprobe", 4711)
RESULT = "Resprobe"
# Mistral's templates take only ids of this form.
IDS = ("aProbe001", "bProbe002")

# The variables by which templates turn the reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")
# The fields in which templates look for an assistant's reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]
Render = Callable[[dict[str, Any]], str]


def tool(name: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    properties = {
        KEYS[0]: {"type": "string", "description": "A text."},
        KEYS[1]: {"type": "integer", "description": "A number."},
    }
    parameters = {"type": "object", "properties": properties, "required": [*KEYS]}
    function = {"name": name, "description": "A probe.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool(name) for name in NAMES]


def user() -> Message:
    """Return the turn that every probe begins with."""
    return {"role": "user", "content": USER}


def assistant(content: str = CONTENT, **fields: Any) -> Message:
    """Return an assistant's turn."""
    return {"role": "assistant", "content": content, **fields}


def calls(arguments: Any, num_calls: int) -> list[dict[str, Any]]:
    """Return tool calls with the same arguments."""
    return [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name in zip(IDS[:num_calls], NAMES[:num_calls], strict=True)
    ]


def results(num_calls: int) -> list[Message]:
    """Return the answers of tools to calls."""
    return [
        {"role": "tool", "content": RESULT, "name": name, "tool_call_id": id_}
        for id_, name in zip(IDS[:num_calls], NAMES[:num_calls], strict=True)
    ]


@dataclass(slots=True)
class Prober:
    """Renders probes with one template, until the first that runs away.

    Args:
        render: renders the template's variables; raises whatever the template raises.
    """

    render: Render
    has_run_away: bool = False

    def text(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        asks: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str | None:
        """Return the prompt, or None where the template refuses the chat.

        Args:
            messages: the chat.
            tools: functions in OpenAI's form.
            asks: end with the beginning of the assistant's next turn.
            variables: further variables of the template.
        """
        if self.has_run_away:
            return None
        chat = {"messages": messages, "tools": tools, "add_generation_prompt": asks}
        try:
            return self.render((variables or {}) | chat)
        except TemplateRanAway:
            self.has_run_away = True
            return None
        except Exception:  # a template is a program: it may fail in any way
            return None
