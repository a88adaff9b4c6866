"""The flags that describe a load, the same for `bench.serving` and `bench.simulate.simulator`."""

import argparse
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bench.load.trace import LENGTHS_FORM, Lengths, TraceSpec
from quadriga.config.flags import flag_name


class LoadFlag(NamedTuple):
    """kind: makes the value of its text. default: None where the flag has none to show. alias:
    what other bench clients call it."""

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
        str, None, "SPEC", f"random token ids in place of a text, so many: {LENGTHS_FORM}"
    ),
    "max_new_tokens": LoadFlag(
        str, "64", "SPEC", f"of each request: {LENGTHS_FORM}", alias="--random-output-len"
    ),
    "prefix_groups": LoadFlag(
        int, 0, "G", "groups of prompts, each with a random prefix of its own in common"
    ),
    "prefix_len": LoadFlag(int, 0, "P", "tokens of such a prefix"),
    "prefix_order": LoadFlag(
        str,
        "shuffled",
        None,
        "whether the groups are mixed or come one after the other",
        choices=("shuffled", "grouped"),
    ),
    "turns": LoadFlag(
        int,
        1,
        "T",
        "requests of a chat: each continues the one before, prompt and answer, with"
        " --random-input-len tokens more",
    ),
    "think_time": LoadFlag(
        float,
        0.0,
        "SECONDS",
        "from an answer to the next request of the chat, or of the closed loop",
    ),
    "num_clients": LoadFlag(int, 1, "N", "clients, each with a connection, to spread over"),
    "request_rate": LoadFlag(
        float,
        math.inf,
        "R",
        "requests (with --turns: chats) a second, at random times; inf: all at once",
    ),
    "burstiness": LoadFlag(
        float, 1.0, "B", "of --request-rate: 1 is Poisson, less is burstier, inf is even"
    ),
    "max_concurrency": LoadFlag(
        int,
        None,
        "N",
        "closed loop: N at a time, the next when one has ended; with --request-rate: no more than N"
        " at a time, so that requests may leave later than that says",
    ),
}

LOAD_DEFAULTS: dict[str, Any] = {name: flag.default for name, flag in LOAD_FLAGS.items()}
"""A command that has other ones says so."""


def add_load_flags(
    group: Any, names: Iterable[str] = LOAD_FLAGS, defaults: Mapping[str, Any] = LOAD_DEFAULTS
) -> None:
    """Add these flags to a parser; like those of a server, absent ones stay out of the namespace.

    defaults: shown in the help.
    """
    for name in names:
        flag, default = LOAD_FLAGS[name], defaults[name]
        group.add_argument(
            *filter(None, (flag_name(name), flag.alias)),
            type=flag.kind,
            dest=name,
            default=argparse.SUPPRESS,
            metavar=flag.placeholder,
            choices=flag.choices,
            help=flag.help + ("" if default is None else f" (default: {default})"),
        )


def trace_spec(values: Mapping[str, Any]) -> TraceSpec:
    """The load that is meant. values: of every load flag, and of `seed`. ConfigError for values
    that cannot work."""
    input_len, output_len = values["random_input_len"], values["max_new_tokens"]
    return TraceSpec(
        num_requests=values["num_requests"],
        output_len=Lengths.parse(output_len, "max_new_tokens"),
        input_len=None if input_len is None else Lengths.parse(input_len, "random_input_len"),
        request_rate=values["request_rate"],
        burstiness=values["burstiness"],
        max_concurrency=values["max_concurrency"],
        prefix_groups=values["prefix_groups"],
        prefix_len=values["prefix_len"],
        shuffle_groups=values["prefix_order"] == "shuffled",
        turns=values["turns"],
        think_time=values["think_time"],
        num_clients=values["num_clients"],
        seed=values["seed"],
    )
