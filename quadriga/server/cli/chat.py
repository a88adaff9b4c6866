"""`quadriga chat`: a conversation at the terminal. `quadriga ask`: one question, one answer."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quadriga.client import Client, types
from quadriga.errors import (
    InvalidRequest,
    PromptTooLong,
    QuadrigaError,
    ServerFailed,
    ServerUnreachable,
)
from quadriga.sampling.params import SamplingParams
from quadriga.server.cli.server_api import CallRefused, GatewayClient
from quadriga.server.cli.shared import (
    add_model,
    add_sampling,
    add_server,
    is_web_address,
    note,
    sampling,
    show_reasoning,
    speed,
    timing_line,
)
from quadriga.wire.client import DEFAULT_ENDPOINT

Turn = dict[str, str]
AnyClient = Client | GatewayClient
OTHER_DOOR = (
    "a server with API keys may have no ZeroMQ socket: try --endpoint http://127.0.0.1:8000"
    " --api-key KEY"
)


@contextmanager
def connect(arguments: argparse.Namespace) -> Iterator[AnyClient]:
    """Connect to the server of the flags: to its ZeroMQ socket, or by HTTP."""
    if is_web_address(arguments.endpoint):
        with GatewayClient(
            arguments.endpoint, arguments.api_key, show_reasoning, arguments.model
        ) as gateway:
            yield gateway
        return
    client = Client(arguments.endpoint, curve_dir=arguments.curve_dir, model=arguments.model)
    try:
        with client:
            yield client
    except ServerUnreachable:
        if arguments.endpoint == DEFAULT_ENDPOINT:
            note(OTHER_DOOR)
        raise


@dataclass
class Conversation:
    """A system prompt and the questions and answers so far.

    Attributes:
        system: the system prompt; "": none.
        turns: questions and answers in turns, as the API's messages.
    """

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[Turn]:
        """Return the messages of the chat, with a further question if one is given."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [] if question is None else [{"role": "user", "content": question}]
        return [*system, *self.turns, *asked]

    def add(self, question: str, answer: str) -> None:
        """Append a question and its answer."""
        self.turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def remove_last(self) -> str | None:
        """Remove the last question and its answer; return the question, None if there is none."""
        if not self.turns:
            return None
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        return question

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raise OSError if the file cannot be written."""
        text = json.dumps(self.messages(), ensure_ascii=False, indent=2)
        path.write_text(text + "\n", encoding="utf-8")


# --- chat -----------------------------------------------------------------------------------------

PROMPT, CONTINUED_PROMPT = "> ", ". "
GREETING = "/help lists the commands · Ctrl-C stops an answer · Ctrl-D leaves"
NO_TEMPLATE = "the model has no chat template and continues the text, as with --plain"
ALIASES = {"/clear": "/reset", "/exit": "/quit"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quadriga chat`."""
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt of the chat")
    add_model(parser)
    add_server(parser)
    add_sampling(parser, temperature=None)


def run(arguments: argparse.Namespace) -> None:
    """Chat until the user exits. Raise InvalidRequest for a model without a chat template."""
    # readline, where it exists, adds line editing and a history to input().
    with suppress(ImportError):
        import readline  # noqa: F401
    with connect(arguments) as client:
        info = client.info()
        if not info.get("chat", True):
            raise InvalidRequest(
                f"{info['model']} has no chat template, it is a base model: quadriga ask continues"
                " a text; a server's --chat-template gives it one"
            )
        note(f"{info['model']} at {arguments.endpoint} · {GREETING}")
        Chat(client, sampling(arguments), arguments.system).talk()


class ChatCommand(NamedTuple):
    """A command that is typed in a chat.

    Attributes:
        argument: word for its argument in the help; "": it takes none.
        text: its help.
        run: function that gets the argument.
    """

    argument: str
    text: str
    run: Callable[[str], None]


class Chat:
    """A conversation. Each question sends all turns; the server's prefix cache holds their KV."""

    def __init__(self, client: AnyClient, params: SamplingParams, system: str) -> None:
        self._client = client
        self._params = params
        self._conversation = Conversation(system)
        self._has_ended = False
        self._commands = {
            "/help": ChatCommand("", "list the commands", self._help),
            "/system": ChatCommand(
                "TEXT", "set the system prompt; without TEXT remove it", self._set_system
            ),
            "/regen": ChatCommand("", "answer the last question again", self._regenerate),
            "/save": ChatCommand("FILE", "write the messages to FILE, as JSON", self._save),
            "/reset": ChatCommand("", "start over; the system prompt stays", self._reset),
            "/quit": ChatCommand("", "leave, as Ctrl-D does", self._quit),
        }

    def talk(self) -> None:
        """Read and answer questions until the end of the input or /quit.

        Raises:
            ServerUnreachable, ServerFailed: the server is gone.
        """
        while not self._has_ended:
            try:
                text = _read_text()
            except EOFError:
                return
            except KeyboardInterrupt:
                note(f"\n{GREETING}")
                continue
            if text.startswith("/"):
                self._run_command(text)
            elif text:
                self._answer(text)

    # --- commands ---------------------------------------------------------------------------------

    def _run_command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        command = self._commands.get(ALIASES.get(name, name))
        if command is None:
            note(f"no such command: {name}. /help lists the commands")
        else:
            command.run(argument.strip())

    def _help(self, _: str) -> None:
        for name, command in self._commands.items():
            note(f"{f'{name} {command.argument}':14} {command.text}")
        note("A line that ends with a backslash is continued by the next one.")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text
        note("the system prompt is set" if text else "there is no system prompt now")

    def _regenerate(self, _: str) -> None:
        turns = list(self._conversation.turns)
        question = self._conversation.remove_last()
        if question is None:
            note("there is no question to answer again")
        elif not self._answer(question):
            self._conversation.turns = turns

    def _save(self, file: str) -> None:
        if not file:
            note("/save needs a file: /save chat.json")
            return
        try:
            self._conversation.save(Path(file).expanduser())
        except OSError as error:
            note(f"{file} cannot be written: {error.strerror}")
        else:
            note(f"the chat is in {file}")

    def _reset(self, _: str) -> None:
        self._conversation.turns.clear()
        note("the chat starts over")

    def _quit(self, _: str) -> None:
        self._has_ended = True

    # --- answers ----------------------------------------------------------------------------------

    def _answer(self, question: str) -> bool:
        """Print the answer as it comes; return whether the chat has a new turn.

        An answer that was stopped stays in the chat; a question without an answer does not.
        """
        pieces: list[str] = []
        try:
            completion = self._stream(question, pieces)
        except KeyboardInterrupt:
            print(flush=True)
            note("stopped")
            if not pieces:
                return False
        except (ServerUnreachable, ServerFailed):
            print(flush=True)
            raise
        except PromptTooLong as error:
            note(f"{error}. Or start over with /reset")
            return False
        except QuadrigaError as error:
            print(flush=True)
            note(f"{type(error).__name__}: {error}")
            return False
        else:
            if completion is not None and sys.stdout.isatty() and (text := speed(completion)):
                note(text)
        self._conversation.add(question, "".join(pieces))
        return True

    def _stream(self, question: str, pieces: list[str]) -> types.Completion | None:
        """Print and collect an answer; return its completion, None if the server sent none."""
        completion = None
        chunks = self._client.stream(
            self._conversation.messages(question), self._params, clamp_max_new_tokens=True
        )
        for chunk in chunks:
            pieces.append(chunk.text)
            print(chunk.text, end="", flush=True)
            completion = chunk.completion or completion
        print(flush=True)
        return completion


def _read_text() -> str:
    """Return a line, and the lines that continue it.

    Raises:
        EOFError: the input has ended.
        KeyboardInterrupt: the line was cancelled.
    """
    is_terminal = sys.stdin.isatty()
    lines = [input(PROMPT if is_terminal else "")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(CONTINUED_PROMPT if is_terminal else ""))
    return "\n".join(lines).strip()


# --- ask ------------------------------------------------------------------------------------------


def add_ask_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quadriga ask`."""
    parser.add_argument("prompt", nargs="+", help="the question; several words become one text")
    parser.add_argument("--plain", action="store_true", help="continue the text; no chat template")
    parser.add_argument(
        "--timings",
        action="store_true",
        help="print time in the queue, time to the first token, tok/s and total after the answer",
    )
    add_model(parser)
    add_server(parser)
    add_sampling(parser, temperature=0.0)


def run_ask(arguments: argparse.Namespace) -> None:
    """Print the answer as it comes. A model without a chat template continues the text."""
    text, params = " ".join(arguments.prompt), sampling(arguments)
    with connect(arguments) as client:
        if arguments.plain:
            completion = _print_answer(client, text, params)
        else:
            completion = _print_chat_answer(client, text, params)
    print()
    if arguments.timings and completion is not None:
        note(timing_line(completion))


def _print_chat_answer(
    client: AnyClient, text: str, params: SamplingParams
) -> types.Completion | None:
    try:
        return _print_answer(client, [{"role": "user", "content": text}], params)
    except (InvalidRequest, CallRefused):
        if client.info().get("chat", True):
            raise
    note(NO_TEMPLATE)
    return _print_answer(client, text, params)


def _print_answer(
    client: AnyClient, prompt: types.Prompt, params: SamplingParams
) -> types.Completion | None:
    """Print an answer and return it; None if the server sent no end of it."""
    completion = None
    for chunk in client.stream(prompt, params):
        print(chunk.text, end="", flush=True)
        completion = chunk.completion or completion
    return completion
