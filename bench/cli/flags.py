"""The command line of `bench.serving`: its flags, and the combinations that are refused."""

import argparse
import math
from argparse import Namespace
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from bench.cli.load_flags import (
    LOAD_DEFAULTS,
    LOAD_FLAGS,
    add_goodput,
    add_load_flags,
    server_flag_names,
    server_flags_in,
)
from bench.client.backends import DEFAULT_BASE_URL
from bench.load.workload import DEFAULT_PROMPT
from quadriga.config import server_config
from quadriga.config.flags import flag_name
from quadriga.errors import ConfigError
from quadriga.sampling.limits import MAX_SEED

DESCRIPTION = """Measure a server as a streaming client sees it. Without --endpoint the bench starts
a server of its own, which takes the server's flags; with it, a running one is measured."""

# These switches belong to the bench until the server has flags of the same names.
SWITCHES = {
    "paged_attn": "ask for paged attention (it is always on)",
    "cuda_graph": "ask for CUDA graphs in decode",
}
# Server flags that are allowed beside a running server.
CLIENT_SERVER_FLAGS = ("endpoint", "model", "curve_dir")
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
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
OUTPUT_FILES = ("json", "output_file", "plot", "save_trace", "server_log")

# The flag that each value of --dataset-name needs.
DATASETS = {
    "random": "random_input_len",
    "shared-prefix": "prefix_groups",
    "sharegpt": "dataset_path",
    "trace": "dataset_path",
}
NOT_IN_SHAREGPT = (
    "trace",
    "random_input_len",
    "prompt",
    "prompt_repeats",
    "prompt_form",
    "prefix_groups",
    "turns",
)
# Each flag, and the flags that would have no effect beside it.
EXCLUDES = {
    "trace": (*LOAD_FLAGS, *TEXT_FLAGS, *INTERVAL_FLAGS),
    "random_input_len": ("prompt", "prompt_repeats"),
    "prefix_groups": ("unique_prompts",),
    "request_rate": INTERVAL_FLAGS,
    "max_concurrency": INTERVAL_FLAGS,
    "output_file": ("save_result",),
}
# Each flag, and the flags of which it needs at least one.
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


def read_flags(argv: list[str]) -> Namespace:
    """Return every flag's value; absent server flags stay out, or raise ConfigError."""
    arguments, given = _arguments(argv)
    _apply_dataset(arguments, given)
    _check_numbers(arguments)
    _check_together(arguments, given)
    return arguments


def result_file(arguments: Namespace) -> Path | None:
    """Return the file of --output-file or --save-result, or None."""
    if arguments.save_result:
        model = getattr(arguments, "model", "").rstrip("/").rsplit("/", 1)[-1] or "model"
        rate = f"{arguments.request_rate:g}qps" if arguments.request_rate < math.inf else "infqps"
        return Path(f"{arguments.backend}-{rate}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json")
    path: Path | None = arguments.output_file
    return path


# --- the parser -----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows all flags")


def _arguments(argv: list[str]) -> tuple[Namespace, set[str]]:
    """Return every flag's value, and the names of the flags that were given."""
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
    _add_target(parser.add_argument_group("server to measure"))
    _add_load(parser.add_argument_group("requests"))
    add_load_flags(parser.add_argument_group("sharing among requests"), SHARING_FLAGS)
    _add_pace(parser.add_argument_group("schedule"))
    _add_output(parser.add_argument_group("output"))
    server_config.add_flags(parser)
    switches = parser.add_argument_group("features to ask for; the output shows the server's own")
    for name, text in SWITCHES.items():
        if name not in server_flag_names():
            switches.add_argument(flag_name(name), action="store_true", help=text)
    return parser


def _add_target(group: Any) -> None:
    group.add_argument(
        "--backend",
        choices=("zmq", "openai"),
        default="zmq",
        help="our own protocol, or an OpenAI-compatible server; --model then names its model",
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help=f"URL of the OpenAI-compatible server (default: {DEFAULT_BASE_URL}); the environment"
        " variable OPENAI_API_KEY holds its key",
    )
    group.add_argument("--openai-endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="fields to add to the body of every request; null removes a field",
    )
    group.add_argument(
        "--tokenizer",
        default="",
        metavar="MODEL",
        help="directory or model whose tokenizer makes the prompts (default: the server's model)",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="random (--random-input-len), shared-prefix (--prefix-groups), sharegpt or trace"
        " (--dataset-path); without it, a text",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="sharegpt: a JSON list of objects with `conversations`, whose first two turns give"
        " the prompt and the length of the answer; trace: as for --trace",
    )
    group.add_argument("--prompt", help=f"text of every request (default: {DEFAULT_PROMPT!r})")
    group.add_argument("--prompt-repeats", type=int, default=1, help="repeat the text N times")
    group.add_argument(
        "--unique-prompts",
        action="store_true",
        help="give every request a prompt of its own, so that no prefix cache helps",
    )
    add_load_flags(group, ("random_input_len",))
    group.add_argument(
        "--prompt-form",
        choices=("ids", "text"),
        default="ids",
        help="send random prompts as token ids, or as words of exactly as many tokens",
    )
    group.add_argument(
        "--same-prompts",
        action="store_true",
        help="send the same prompts in every run, which the prefix cache may then serve",
    )
    group.add_argument(
        "--pretok", action="store_true", help="send token ids, so that the server tokenizes nothing"
    )
    group.add_argument(
        "--truncate", action="store_true", help="keep the last tokens of a prompt that is too long"
    )
    add_load_flags(group, ("num_requests", "max_new_tokens"))
    group.add_argument(
        "--no-stop-on-eos",
        action="store_true",
        help="generate all --max-new-tokens of every request",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    group.add_argument("--seed", type=int, default=0, help="seed of sampling and of random prompts")


def _add_pace(group: Any) -> None:
    group.add_argument("--submit-interval-ms", type=float, default=0.0, help="(default: 0)")
    group.add_argument(
        "--submit-schedule",
        choices=("relative", "absolute"),
        default="relative",
        help="count the interval from the submit before, or from the start of the run",
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
        help="unmeasured runs with other prompts (default: 1)",
    )
    group.add_argument("--repeat-runs", type=int, default=1, help="measured runs (default: 1)")


def _add_output(group: Any) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    group.add_argument(
        "--details", action="store_true", help="add the record of every request to --json"
    )
    group.add_argument(
        "--output-file",
        type=Path,
        metavar="FILE.jsonl",
        help="append each run as a line of JSON with the keys that the bench clients of SGLang and"
        " vLLM write",
    )
    group.add_argument(
        "--save-result",
        action="store_true",
        help="the same, into a file named after backend, rate, model and time",
    )
    group.add_argument(
        "--output-details",
        "--save-detailed",
        action="store_true",
        help="add lengths, times and errors of every request to --output-file",
    )
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the first measured run")
    group.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="write the first measured run's requests; --trace and the same --seed repeat them",
    )
    add_goodput(group)
    group.add_argument(
        "--server-log",
        type=Path,
        metavar="FILE",
        help="log file of the server that the bench starts (default: standard error)",
    )


# --- checks ---------------------------------------------------------------------------------------


def _apply_dataset(arguments: Namespace, given: set[str]) -> None:
    """Translate --dataset-name into the other flags, in `arguments` and in `given`.

    `arguments.file_lengths` becomes true if answers are as long as those of the file.
    """
    name = arguments.dataset_name
    arguments.file_lengths = name == "sharegpt" and "max_new_tokens" not in given
    if name is None:
        return
    if DATASETS[name] not in given:
        needed = flag_name(DATASETS[name])
        raise ConfigError(f"--dataset-name {name} has no effect without {needed}: add it")
    if "dataset_path" in given and DATASETS[name] != "dataset_path":
        raise ConfigError(f"--dataset-path has no effect with --dataset-name {name}: leave it out")
    if name == "trace":
        arguments.trace = arguments.dataset_path
        given.add("trace")
    if name == "sharegpt" and (idle := [flag_name(n) for n in NOT_IN_SHAREGPT if n in given]):
        raise ConfigError(
            f"{', '.join(idle)} would have no effect: --dataset-name sharegpt sends what the file"
            " has"
        )


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
    _check_files(arguments)
    if arguments.backend == "openai":
        _refuse_server_flags(arguments, arguments.base_url or DEFAULT_BASE_URL, ("model",))
    elif idle := [flag_name(name) for name in OPENAI_FLAGS if name in given]:
        raise ConfigError(f"{', '.join(idle)} has no effect without --backend openai: add it")
    elif "endpoint" in arguments:
        _refuse_server_flags(arguments, arguments.endpoint, CLIENT_SERVER_FLAGS)


def _refuse_server_flags(arguments: Namespace, where: str, allowed: Collection[str]) -> None:
    idle = [flag_name(n) for n in server_flags_in(arguments) if n not in allowed]
    idle += [flag_name(n) for n in ("config", "server_log") if getattr(arguments, n, None)]
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} would have no effect on the server that runs at {where}: leave"
            " them out, or measure a server of the bench's own"
        )


def _check_files(arguments: Namespace) -> None:
    """Check that every output file can be written, before anything is run."""
    for name in OUTPUT_FILES:
        path = getattr(arguments, name)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag_name(name)} {path}: there is no directory {path.parent}")
    if arguments.plot is not None and arguments.plot.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {arguments.plot}: it must end in {', '.join(PLOT_SUFFIXES)}")
