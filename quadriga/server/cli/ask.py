"""`quadriga ask "..."`: one question, one answer."""

import argparse

from quadriga.client import Client
from quadriga.client.types import Completion, Prompt
from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.server.cli.shared import add_sampling, add_server, note, sampling, timing_line

NAME = "ask"
HELP = "ask a running server, and print the answer as it comes"
NO_TEMPLATE = "the model has no chat template and continues the text, as with --plain"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("prompt", nargs="+", help="the question; several words become one text")
    parser.add_argument("--plain", action="store_true", help="continue the text; no chat template")
    parser.add_argument(
        "--timings",
        action="store_true",
        help="print time in the queue, time to the first token, tok/s and total after the answer",
    )
    add_server(parser)
    add_sampling(parser, temperature=0.0)


def run(arguments: argparse.Namespace) -> None:
    """Print the answer as it comes. A model without a chat template continues the text."""
    text, params = " ".join(arguments.prompt), sampling(arguments)
    with Client(arguments.endpoint, curve_dir=arguments.curve_dir) as client:
        if arguments.plain:
            completion = _print_answer(client, text, params)
        else:
            completion = _print_chat_answer(client, text, params)
    print()
    if arguments.timings and completion is not None:
        note(timing_line(completion))


def _print_chat_answer(client: Client, text: str, params: SamplingParams) -> Completion | None:
    try:
        return _print_answer(client, [{"role": "user", "content": text}], params)
    except InvalidRequest:
        if client.info().get("chat", True):
            raise
    note(NO_TEMPLATE)
    return _print_answer(client, text, params)


def _print_answer(client: Client, prompt: Prompt, params: SamplingParams) -> Completion | None:
    """Print an answer and return it; None if the server sent no end of it."""
    completion = None
    for chunk in client.stream(prompt, params):
        print(chunk.text, end="", flush=True)
        completion = chunk.completion or completion
    return completion
