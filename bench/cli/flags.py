"""The command line of `bench.serving`: its flags, and which of them mean nothing together."""

import argparse
import dataclasses
import math
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

from bench.cli.dataset_flags import add_dataset, take_dataset
from bench.cli.load_flags import LOAD_DEFAULTS, LOAD_FLAGS, add_load_flags
from bench.cli.output_flags import add_output, check_files
from bench.client.transport import DEFAULT_BASE_URL
from bench.load.workload import DEFAULT_PROMPT
from quadriga.config import server_config as server_flags
from quadriga.config.flags import flag_name
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError
from quadriga.sampling.limits import MAX_SEED

DESCRIPTION = """Measure a server as a streaming client sees it. Without --endpoint the bench starts
a server of its own, which takes the server's flags; with it, a running one is measured."""

SWITCHES = {
    "paged_attn": "ask for paged attention (it is always on)",
    "cuda_graph": "ask for CUDA graphs in decode",
}
"""Switches that stay with the bench until the server has a flag of that name."""

INFORMATIVE = ("endpoint", "model", "curve_dir")
"""Server flags that are allowed beside a running server. The keys are then the bench's own."""

OPENAI_FLAGS = ("base_url", "openai_endpoint", "extra_body")
TEXT_FLAGS = ("prompt", "prompt_repeats", "unique_prompts", "pretok")
SHARING_FLAGS = (
    "prefix_groups",
    "prefix_len",
    "prefix_order",
    "turns",
    "think_time",
    "num_clients",
)
INTERVAL_FLAGS = ("submit_interval_ms", "submit_schedule")
ARRIVAL_FLAGS = ("request_rate", "burstiness")
EXCLUDES = {
    "trace": (*LOAD_FLAGS, *TEXT_FLAGS, *INTERVAL_FLAGS),
    "random_input_len": ("prompt", "prompt_repeats"),
    "prefix_groups": ("unique_prompts",),
    "request_rate": INTERVAL_FLAGS,
    "max_concurrency": INTERVAL_FLAGS,
    "output_file": ("save_result",),
}
"""A flag, and those that mean nothing beside it."""

NEEDS = {
    "dataset_path": ("dataset_name",),
    "details": ("json",),
    "output_details": ("output_file", "save_result"),
    "burstiness": ("request_rate",),
    "prefix_groups": ("random_input_len",),
    "prefix_len": ("prefix_groups",),
    "prefix_order": ("prefix_groups",),
    "turns": ("random_input_len",),
    "think_time": ("turns", "max_concurrency"),
    "save_trace": ("trace", "random_input_len", "pretok"),
    "prompt_form": ("trace", "random_input_len"),
}
"""A flag, and those of which one must be given for it to mean something."""


def read_flags(argv: list[str]) -> Namespace:
    """Every flag's value; server flags that are absent stay out. ConfigError for values that
    cannot work, alone or together."""
    arguments, given = _arguments(argv)
    take_dataset(arguments, given)
    _check_numbers(arguments)
    _check_together(arguments, given)
    return arguments


def server_flags_in(arguments: Namespace) -> dict[str, Any]:
    """The server flags that were given."""
    return {k: v for k, v in vars(arguments).items() if k in server_flag_names()}


def server_flag_names() -> set[str]:
    groups = ServerConfig().groups()
    return {field.name for group in groups for field in dataclasses.fields(group)}


# --- the parser -----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the forty lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows all flags")


def _arguments(argv: list[str]) -> tuple[Namespace, set[str]]:
    """Every flag's value, and the names of the flags that were given."""
    parser, unset = _parser(), object()
    defaults = LOAD_DEFAULTS | vars(parser.parse_args([]))
    parsed = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(defaults, unset))))
    given = {name: value for name, value in parsed.items() if value is not unset}
    return Namespace(**{**defaults, **given}), set(given)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m bench.serving",
        usage="%(prog)s [FLAGS]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    _add_transport(parser.add_argument_group("to whom"))
    _add_load(parser.add_argument_group("what is sent"))
    add_load_flags(parser.add_argument_group("what requests have in common"), SHARING_FLAGS)
    _add_pace(parser.add_argument_group("when it is sent"))
    add_output(parser.add_argument_group("what comes out"))
    server_flags.add_flags(parser)
    switches = parser.add_argument_group("what the server shall use; the output says what it does")
    for name, text in SWITCHES.items():
        if name not in server_flag_names():
            switches.add_argument(flag_name(name), action="store_true", help=text)
    return parser


def _add_transport(group: Any) -> None:
    group.add_argument(
        "--backend",
        choices=("zmq", "openai"),
        default="zmq",
        help="our own protocol, or any OpenAI-compatible server, of which --model is then the name",
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help=f"of an OpenAI-compatible server (default: {DEFAULT_BASE_URL}); its key, if it wants"
        " one, is OPENAI_API_KEY of the environment",
    )
    group.add_argument("--openai-endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="fields for the body of every request; null takes one out",
    )
    group.add_argument(
        "--tokenizer",
        default="",
        metavar="MODEL",
        help="directory or model whose tokenizer makes the prompts (default: the server's model)",
    )


def _add_load(group: Any) -> None:
    add_dataset(group)
    group.add_argument("--prompt", help=f"text of every request (default: {DEFAULT_PROMPT!r})")
    group.add_argument("--prompt-repeats", type=int, default=1, help="repeat the text N times")
    group.add_argument(
        "--unique-prompts",
        action="store_true",
        help="no two requests share a prefix, so that no cache helps",
    )
    add_load_flags(group, ("random_input_len",))
    group.add_argument(
        "--prompt-form",
        choices=("ids", "text"),
        default="ids",
        help="random prompts as token ids, or as words of exactly as many tokens",
    )
    group.add_argument(
        "--same-prompts",
        action="store_true",
        help="every run sends the very same prompts, which the prefix cache may then serve",
    )
    group.add_argument(
        "--pretok", action="store_true", help="send token ids, so that the server tokenises nothing"
    )
    group.add_argument(
        "--truncate", action="store_true", help="keep the last tokens of a prompt that is too long"
    )
    add_load_flags(group, ("num_requests", "max_new_tokens"))
    group.add_argument(
        "--no-stop-on-eos",
        action="store_true",
        help="every request generates all of its --max-new-tokens",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    group.add_argument("--seed", type=int, default=0, help="of sampling and of random prompts")


def _add_pace(group: Any) -> None:
    group.add_argument("--submit-interval-ms", type=float, default=0.0, help="(default: 0)")
    group.add_argument(
        "--submit-schedule",
        choices=("relative", "absolute"),
        default="relative",
        help="interval after the submit before, or by the clock from the start",
    )
    add_load_flags(group, (*ARRIVAL_FLAGS, "max_concurrency"))
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay a trace file (format: bench/load/trace.py, or Mooncake's)",
    )
    group.add_argument(
        "--warmup-runs",
        type=int,
        default=1,
        help="runs with other prompts that are not measured (default: 1)",
    )
    group.add_argument("--repeat-runs", type=int, default=1, help="measured runs (default: 1)")


# --- checks ---------------------------------------------------------------------------------------


def _check_numbers(arguments: Namespace) -> None:
    for name in ("prompt_repeats", "repeat_runs"):
        value = getattr(arguments, name)
        if not value > 0:
            raise ConfigError(f"{name} must be positive (it is {value})")
    for name in ("warmup_runs", "submit_interval_ms", "temperature"):
        value = getattr(arguments, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be 0 or more (it is {value})")
    if not 0 <= arguments.seed <= MAX_SEED:
        raise ConfigError(f"seed must be from 0 to {MAX_SEED} (it is {arguments.seed})")


def _check_together(arguments: Namespace, given: Collection[str]) -> None:
    for name, others in EXCLUDES.items():
        idle = [flag_name(other) for other in others if other in given]
        if name in given and idle:
            raise ConfigError(
                f"{', '.join(idle)} would have no effect beside {flag_name(name)}: leave"
                f" {' and '.join(idle)} out, or {flag_name(name)}"
            )
    for name, others in NEEDS.items():
        if name in given and not set(others) & set(given):
            choice = " or ".join(flag_name(other) for other in others)
            raise ConfigError(f"{flag_name(name)} has no effect without {choice}: add it")
    check_files(arguments)
    if arguments.backend == "openai":
        _refuse_server_flags(arguments, arguments.base_url or DEFAULT_BASE_URL, ("model",))
    elif idle := [flag_name(name) for name in OPENAI_FLAGS if name in given]:
        raise ConfigError(f"{', '.join(idle)} has no effect without --backend openai: add it")
    elif "endpoint" in arguments:
        _refuse_server_flags(arguments, arguments.endpoint, INFORMATIVE)


def _refuse_server_flags(arguments: Namespace, where: str, informative: Collection[str]) -> None:
    idle = [flag_name(n) for n in server_flags_in(arguments) if n not in informative]
    idle += [flag_name(n) for n in ("config", "server_log") if getattr(arguments, n, None)]
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} would have no effect on the server that runs at {where}: leave"
            " them out, or measure a server of the bench's own"
        )
