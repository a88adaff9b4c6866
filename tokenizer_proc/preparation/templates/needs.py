"""Find by probes what a template needs of the chats that it is given."""

import json
from dataclasses import dataclass

from tokenizer_proc.preparation.templates.call_styles import ARGUMENTS
from tokenizer_proc.preparation.templates.probes import (
    CONTENT,
    KEYS,
    NAMES,
    RESULT,
    TOOLS,
    VALUES,
    Message,
    Prober,
    assistant,
    calls,
    results,
    user,
)

_SYSTEM = "Sysprobe."
_LONG_IDS = ("call_0123456789abcdef", "call_fedcba9876543210")


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """What a template takes, and in which form.

    Attributes:
        takes_tools: it writes the tools of a chat into the prompt.
        takes_calls: it writes the calls of an assistant's turn.
        takes_results: it writes the answers of tools.
        takes_system: it writes a system message at the head of a chat.
        takes_developer: it has a form of its own for a message of the developer.
        takes_repeated_roles: it takes several turns of one role in a row.
        arguments_are_text: it wants the arguments of calls as JSON text, and not as an object.
        ids_are_short: it takes ids of calls only if they are 9 letters and digits.
    """

    takes_tools: bool = False
    takes_calls: bool = False
    takes_results: bool = False
    takes_system: bool = True
    takes_developer: bool = False
    takes_repeated_roles: bool = True
    arguments_are_text: bool = False
    ids_are_short: bool = False


def find_needs(prober: Prober) -> TemplateNeeds:
    """Return what a template needs."""
    tools = TOOLS if (takes_tools := _takes_tools(prober)) else None
    as_text = json.dumps(ARGUMENTS)
    objects, texts = (_with_call(prober, arguments, tools) for arguments in (ARGUMENTS, as_text))
    takes_calls = _quality(objects) > 0 or _quality(texts) > 0
    is_text = takes_calls and _quality(texts) > _quality(objects)
    arguments = as_text if is_text else ARGUMENTS
    answered = [user(), _calling(arguments), *results(1), assistant()]
    takes_results = _holds(prober.text(answered, tools), RESULT)
    renamed = json.loads(json.dumps(answered).replace(_call_id(answered), _LONG_IDS[0]))
    system: list[Message] = [{"role": "system", "content": _SYSTEM}, user()]
    return TemplateNeeds(
        takes_tools=takes_tools,
        takes_calls=takes_calls,
        takes_results=takes_results,
        takes_system=_holds(prober.text(system, asks=True), _SYSTEM),
        takes_developer=_takes_developer(prober),
        takes_repeated_roles=_holds(prober.text([user(), user(), assistant()]), CONTENT),
        arguments_are_text=is_text,
        ids_are_short=takes_results and prober.text(renamed, tools) is None,
    )


def _takes_developer(prober: Prober) -> bool:
    """Return whether a developer's message differs from a system message, but for the role."""
    of_developer, of_system = (
        prober.text([{"role": role, "content": _SYSTEM}, user()], asks=True)
        for role in ("developer", "system")
    )
    if of_developer is None or _SYSTEM not in of_developer:
        return False
    return of_developer.replace("developer", "system") != of_system


def _takes_tools(prober: Prober) -> bool:
    system = {"role": "system", "content": _SYSTEM}
    return any(
        _holds(prober.text(chat, TOOLS, asks=True), NAMES[0])
        for chat in ([user()], [system, user()])
    )


def _calling(arguments: object) -> Message:
    return assistant("", tool_calls=calls(arguments, 1))


def _call_id(chat: list[Message]) -> str:
    return str(chat[-2]["tool_call_id"])


def _with_call(prober: Prober, arguments: object, tools: list[Message] | None) -> str | None:
    text = prober.text([user(), _calling(arguments)], tools)
    return text or prober.text([user(), _calling(arguments), *results(1)], tools)


def _holds(text: str | None, word: str) -> bool:
    return text is not None and word in text


def _quality(text: str | None) -> int:
    """Return 2 for arguments as templates should write them, 1 for Python's or escaped, 0: none."""
    if not _holds(text, str(VALUES[0])):
        return 0
    return 1 if _holds(text, f"'{KEYS[0]}': ") or _holds(text, f'\\"{KEYS[0]}\\"') else 2
