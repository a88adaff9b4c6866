"""Flags that `bench.serving` and `bench.simulate` share: the load, goodput limits, the server's."""

import argparse
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.load.datasets import TracePace, read_requests
from bench.load.synthetic import LENGTHS_FORM, Lengths, TraceSpec
from quadriga.server.config import flags, server_config
from simulator.trace import TraceRequest


class LoadFlag(NamedTuple):
    """One flag of a bench.

    Attributes:
        kind: converts the text to the value; bool: a switch without a text.
        default: None: the help shows no default.
        alias: the flag's name in other bench clients.
    """

    kind: type
    default: Any
    placeholder: str | None
    help: str
    choices: tuple[str, ...] | None = None
    alias: str = ""


LOAD_FLAGS = {
    "num_requests": LoadFlag(
        int, 32, "N", "requests in all, with every turn of a chat", alias="--num-prompts"
    ),
    "random_input_len": LoadFlag(
        str, None, "SPEC", f"number of random token ids to send in place of a text: {LENGTHS_FORM}"
    ),
    "max_new_tokens": LoadFlag(
        str,
        "64",
        "SPEC",
        f"tokens to generate per request: {LENGTHS_FORM}",
        alias="--random-output-len",
    ),
    "prefix_groups": LoadFlag(
        int, 0, "G", "groups of prompts; the prompts of a group share a random prefix"
    ),
    "prefix_len": LoadFlag(int, 0, "P", "tokens of a shared prefix"),
    "prefix_order": LoadFlag(
        str,
        "shuffled",
        None,
        "mix the groups, or send one after the other",
        choices=("shuffled", "grouped"),
    ),
    "turns": LoadFlag(
        int,
        1,
        "T",
        "requests of a chat: each continues prompt and answer of the one before with"
        " --random-input-len more tokens",
    ),
    "think_time": LoadFlag(
        float,
        0.0,
        "SECONDS",
        "delay from an answer to the next request of the chat, or of the closed loop",
    ),
    "num_clients": LoadFlag(
        int, 1, "N", "clients, each with its own connection, that the requests are spread over"
    ),
    "request_rate": LoadFlag(
        float,
        math.inf,
        "R",
        "requests (with --turns: chats) per second, at random times; inf: all at once",
    ),
    "burstiness": LoadFlag(
        float, 1.0, "B", "shape of --request-rate: 1 is Poisson, less is burstier, inf is even"
    ),
    "max_concurrency": LoadFlag(
        int,
        None,
        "N",
        "closed loop: N requests in flight, the next one when one has ended; with --request-rate:"
        " at most N in flight, so that requests may leave later than scheduled",
    ),
}

LOAD_DEFAULTS: dict[str, Any] = {name: flag.default for name, flag in LOAD_FLAGS.items()}


def add_load_flags(
    group: Any,
    names: Iterable[str] = LOAD_FLAGS,
    defaults: Mapping[str, Any] = LOAD_DEFAULTS,
    table: Mapping[str, LoadFlag] = LOAD_FLAGS,
) -> None:
    """Add flags of a table to a parser; the help shows `defaults`, and absent flags stay unset."""
    for name in names:
        flag, default, add = table[name], defaults[name], group.add_argument
        options = [*filter(None, (flags.flag_name(name), flag.alias))]
        has_shown_default = default is None or "(default: " in flag.help
        if flag.kind is bool:
            add(*options, dest=name, action="store_true", default=argparse.SUPPRESS, help=flag.help)
            continue
        add(
            *options,
            type=flag.kind,
            dest=name,
            default=argparse.SUPPRESS,
            metavar=flag.placeholder,
            choices=flag.choices,
            help=flag.help + ("" if has_shown_default else f" (default: {default})"),
        )


def add_goodput(group: Any) -> None:
    """Add the flag for the limits that Slo.parse reads."""
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count the requests within these limits as good: ttft:200 tpot:30 e2el:5000, any of"
        " them",
    )


def add_trace(group: Any) -> None:
    """Add the flags for a trace file and how it is played."""
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE",
        help="replay a trace file (format: simulator/trace.py, Mooncake's or Azure's)")  # fmt: skip
    add("--trace-speed", type=float, default=1.0, metavar="X",
        help="X times as fast as it was recorded (default: 1)")  # fmt: skip
    add("--trace-copies", type=int, default=1, metavar="N",
        help="N copies at one time, which begin at other points of it and share nothing with each"
        " other (default: 1)")  # fmt: skip
    add("--trace-seconds", type=float, metavar="S",
        help="so long only (default: once through)")  # fmt: skip


def requests_of_trace(arguments: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests of `--trace`, or raise ConfigError."""
    pace = TracePace(arguments.trace_speed, arguments.trace_copies, arguments.trace_seconds)
    return pace.play(read_requests(arguments.trace))


def trace_spec(values: Mapping[str, Any]) -> TraceSpec:
    """Return the load that the values of all load flags and `seed` describe."""
    input_len = values["random_input_len"]
    names = {field.name for field in dataclasses.fields(TraceSpec)}
    return TraceSpec(
        **{name: value for name, value in values.items() if name in names},
        output_len=Lengths.parse(values["max_new_tokens"], "max_new_tokens"),
        input_len=None if input_len is None else Lengths.parse(input_len, "random_input_len"),
        shuffle_groups=values["prefix_order"] == "shuffled",
    )


def server_flags_in(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the server flags that were given, with their values."""
    names = {field.name for field in flags.flag_fields(*server_config.ServerConfig().groups())}
    return {name: value for name, value in vars(arguments).items() if name in names}
