"""The flags that ask and chat share."""

import argparse
from typing import Any

from quadriga.config.frontend_args import DEFAULT_ENDPOINT
from quadriga.sampling.params import SamplingParams


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the connection."""
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--endpoint",
        default=DEFAULT_ENDPOINT,
        metavar="tcp://HOST:PORT",
        help=f"its public socket (default: {DEFAULT_ENDPOINT})",
    )
    group.add_argument("--curve-dir", metavar="DIR", help="this client's keys, if it requires keys")


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
