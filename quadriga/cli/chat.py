"""`quadriga chat`: a conversation at the terminal."""

import argparse
import sys
from contextlib import suppress

from quadriga.cli.flags import add_sampling, add_server, sampling
from quadriga.client import Client
from quadriga.errors import PromptTooLong, QuadrigaError, ServerFailed, ServerUnreachable
from quadriga.sampling.params import SamplingParams

NAME = "chat"
HELP = "chat with a running server, in many turns"
PROMPT = "> "
COMMANDS = "/clear begins anew · /exit or Ctrl-D leaves · Ctrl-C stops an answer"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--system", metavar="TEXT", help="system prompt of the chat")
    add_server(parser)
    add_sampling(parser, temperature=None)


def run(arguments: argparse.Namespace) -> None:
    """Chat until the user exits."""
    # readline, where it exists, adds line editing and a history to input().
    with suppress(ImportError):
        import readline  # noqa: F401
    with Client(arguments.endpoint, curve_dir=arguments.curve_dir) as client:
        info = client.info()
        _note(f"{info['model']} at {arguments.endpoint} · {COMMANDS}")
        Chat(client, sampling(arguments), arguments.system).talk()


class Chat:
    """A conversation. Each question sends all turns; the server's prefix cache holds their KV."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None) -> None:
        self._client = client
        self._params = params
        self._system_turns = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    def talk(self) -> None:
        """Read and answer questions until the end of the input or /exit.

        Raises:
            ServerUnreachable, ServerFailed: the server is gone.
        """
        while True:
            try:
                line = input(PROMPT if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                _note(f"\n{COMMANDS}")
                continue
            if line == "/exit":
                return
            if line == "/clear":
                self._turns.clear()
                _note("the chat begins anew")
            elif line.startswith("/"):
                _note(f"no such command: {line}. {COMMANDS}")
            elif line:
                self._answer(line)

    def _answer(self, question: str) -> None:
        """Print the answer as it comes.

        An answer that was stopped stays in the chat; a question without an answer does not.
        """
        turns = [*self._turns, {"role": "user", "content": question}]
        pieces: list[str] = []
        try:
            self._stream(turns, pieces)
        except KeyboardInterrupt:
            print(flush=True)
            _note("stopped")
            if not pieces:
                return
        except (ServerUnreachable, ServerFailed):
            print(flush=True)
            raise
        except PromptTooLong as error:
            _note(f"{error}. Or begin anew with /clear")
            return
        except QuadrigaError as error:
            print(flush=True)
            _note(f"{type(error).__name__}: {error}")
            return
        self._turns = [*turns, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, turns: list[dict[str, str]], pieces: list[str]) -> None:
        chunks = self._client.stream(
            self._system_turns + turns, self._params, clamp_max_new_tokens=True
        )
        for chunk in chunks:
            pieces.append(chunk.text)
            print(chunk.text, end="", flush=True)
        print(flush=True)


def _note(text: str) -> None:
    """Print a line that is not part of the chat."""
    print(text, file=sys.stderr, flush=True)
