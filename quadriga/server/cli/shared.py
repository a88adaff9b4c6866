"""What the commands share: flags of the server and of sampling, and notes on standard error."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from quadriga.client.types import Completion
from quadriga.sampling.params import SamplingParams
from quadriga.server.cli.server_api import DEFAULT_URL
from quadriga.wire.client import DEFAULT_ENDPOINT


def add_server(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the flags of the connection. default: of each flag, in place of its own."""
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--endpoint",
        default=default or DEFAULT_ENDPOINT,
        metavar="ADDRESS",
        help="tcp://HOST:PORT of its ZeroMQ socket, or its web address http(s)://HOST:PORT"
        f" (default: {DEFAULT_ENDPOINT})",
    )
    add_api_key(group, "with a web address, if the server needs a key", default)
    group.add_argument(
        "--curve-dir",
        default=default,
        metavar="DIR",
        help="with tcp://: this client's keys, if it needs one",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses one of a server's models."""
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="name or alias, of a server with several models (default: its first one)",
    )


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a connection by HTTP."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    add_api_key(parser, "if the server needs one")


def add_api_key(parser: Any, when: str, default: str | None = None) -> None:
    """Add --api-key to a parser, or to a group of one.

    Args:
        parser: the parser, or the group.
        when: when the key is needed.
        default: the default; None: that of the environment.
    """
    parser.add_argument(
        "--api-key",
        default=default or os.environ.get("QUADRIGA_API_KEY", "").partition(",")[0].strip(),
        metavar="KEY",
        help=f"{when} (default: the environment variable QUADRIGA_API_KEY)",
    )


def is_web_address(endpoint: str) -> bool:
    """Return whether an endpoint is one of HTTP."""
    return endpoint.startswith(("http://", "https://"))


def add_sampling(parser: argparse.ArgumentParser, temperature: float | None) -> None:
    """Add the sampling flags; `temperature` is the default, None the server's."""
    group = parser.add_argument_group("the answer")
    shown = "the model's own" if temperature is None else f"{temperature:g}, greedy"
    add: Any = group.add_argument
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="largest number of tokens of an answer (default: the server's)",
    )
    add("--temperature", type=float, default=temperature, help=f"(default: {shown})")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that reach P")
    add("--seed", type=int, help="the same seed gives the same answer")


def sampling(arguments: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters of the flags."""
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


DIM, NORMAL = "\x1b[2m", "\x1b[0m"


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of equally many cells in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def note(text: str) -> None:
    """Print a line that is not part of an answer, dim on a terminal unless NO_COLOR is set."""
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = f"{DIM}{text}{NORMAL}"
    print(text, file=sys.stderr, flush=True)


def show_reasoning(text: str) -> None:
    """Show a piece of a reasoning on a terminal, dim, beside the answer on standard output."""
    if sys.stderr.isatty():
        print(text if os.environ.get("NO_COLOR") else f"{DIM}{text}{NORMAL}", end="",
              file=sys.stderr, flush=True)  # fmt: skip


def speed(completion: Completion) -> str:
    """Return number of tokens and tokens per second; "" for an answer of less than two tokens."""
    count, rate = completion.usage.completion_tokens, tokens_per_s(completion)
    return f"{count} tokens · {rate:.1f} tok/s" if rate is not None else ""


def timing_line(completion: Completion) -> str:
    """Return the time in the queue, to the first token and in total, and tokens per second."""
    times, usage = completion.timings, completion.usage
    parts = []
    if times.admitted:
        parts.append(f"queue {_ms(times.admitted - (times.tokenized or times.submitted))}")
    if times.first_token:
        parts.append(f"first token {_ms(times.first_token - times.submitted)}")
    if (rate := tokens_per_s(completion)) is not None:
        parts.append(f"{rate:.1f} tok/s")
    parts.append(f"total {times.delivered - times.submitted:.2f} s")
    parts.append(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached")
    parts.append(f"{usage.completion_tokens} tokens")
    return " · ".join(parts)


def tokens_per_s(completion: Completion) -> float | None:
    """Return the decode speed, from the first token to the last; None for less than two tokens."""
    times = completion.timings.token_times
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return (completion.usage.completion_tokens - 1) / (times[-1] - times[0])


def _ms(seconds: float) -> str:
    return f"{1000 * max(0.0, seconds):.0f} ms"
