"""The flags of `bench.serving`."""

import argparse
import math
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.cli.checks import DATASETS, apply_dataset, apply_report, check
from bench.cli.load_flags import LOAD_DEFAULTS, add_goodput, add_load_flags, add_trace
from bench.client.backends import DEFAULT_BASE_URL
from bench.load.workload import DEFAULT_PROMPT
from quadriga.config import server_config
from quadriga.config.flags import flag_name
from quadriga.config.parser import CommandParser

PROG = "python -m bench.serving"
DESCRIPTION = """Measure a server as a streaming client sees it. Without --endpoint the bench starts
a server of its own, which takes the server's flags; with it, a running one is measured."""

# The server has no flags of these names.
SWITCHES = {
    "paged_attn": "ask for paged attention (it is always on)",
    "cuda_graph": "ask for CUDA graphs in decode",
}
SHARING_FLAGS = (
    *("prefix_groups", "prefix_len", "prefix_order"),
    *("turns", "think_time", "num_clients"),
)


def read_flags(argv: list[str], prog: str) -> Namespace:
    """Return every flag's value; absent server flags stay out, or raise ConfigError.

    `prog` is the command's name in --help.
    """
    arguments, given = _arguments(argv, prog)
    apply_dataset(arguments, given)
    check(arguments, given)
    apply_report(arguments, given)
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


def _arguments(argv: list[str], prog: str) -> tuple[Namespace, set[str]]:
    """Return every flag's value, and the names of the flags that were given."""
    parser, unset = _parser(prog), object()
    defaults = LOAD_DEFAULTS | vars(parser.parse_args([]))
    parsed = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(defaults, unset))))
    given = {name: value for name, value in parsed.items() if value is not unset}
    return Namespace(**{**defaults, **given}), set(given)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog,
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
        _add_switch(switches, flag_name(name), text)
    return parser


def _add_switch(group: Any, name: str, text: str) -> None:
    group.add_argument(name, action="store_true", help=text)


def _add_file(group: Any, name: str, text: str, placeholder: str = "FILE") -> None:
    group.add_argument(name, type=Path, metavar=placeholder, help=text)


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


def _add_load(group: Any) -> None:
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="random (--random-input-len), shared-prefix (--prefix-groups), sharegpt or trace"
        " (--dataset-path); without it, a text",
    )
    _add_file(
        group,
        "--dataset-path",
        "sharegpt: a JSON list of objects with `conversations`, whose first two turns give"
        " the prompt and the length of the answer; trace: as for --trace",
    )
    group.add_argument(
        "--prompt",
        help="text of every request (default: different texts; with --report classic"
        f" {DEFAULT_PROMPT!r})",
    )
    group.add_argument("--prompt-repeats", type=int, default=1, help="repeat the text N times")
    _add_switch(
        group,
        "--unique-prompts",
        "give every request a prompt of its own, so that no prefix cache helps",
    )
    add_load_flags(group, ("random_input_len",))
    group.add_argument(
        "--prompt-form",
        choices=("ids", "text"),
        default="ids",
        help="send random prompts as token ids, or as words of exactly as many tokens",
    )
    _add_switch(
        group,
        "--same-prompts",
        "send the same prompts in every run, which the prefix cache may then serve",
    )
    _add_switch(group, "--pretok", "send token ids, so that the server tokenizes nothing")
    _add_switch(group, "--truncate", "keep the last tokens of a prompt that is too long")
    add_load_flags(group, ("num_requests", "max_new_tokens"))
    _add_switch(group, "--no-stop-on-eos", "generate all --max-new-tokens of every request")
    group.add_argument("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    group.add_argument("--top-p", type=float, help="(default: the server's)")
    group.add_argument("--seed", type=int, default=0, help="seed of sampling and of random prompts")


def _add_pace(group: Any) -> None:
    group.add_argument("--submit-interval-ms", type=float, default=0.0, help="(default: 0)")
    group.add_argument(
        "--submit-schedule",
        choices=("relative", "absolute"),
        default="relative",
        help="count the interval from the submit before, or from the start of the run",
    )
    add_load_flags(group, ("request_rate", "burstiness", "max_concurrency"))
    add_trace(group)
    group.add_argument(
        "--warmup-runs",
        type=int,
        default=1,
        help="unmeasured whole runs with other prompts (default: a few requests)",
    )
    group.add_argument("--repeat-runs", type=int, default=1, help="measured runs (default: 1)")


def _add_output(group: Any) -> None:
    group.add_argument(
        "--report",
        choices=("table", "classic"),
        help="table: one table and a verdict; classic: one line per figure (default: table, and"
        " classic beside flags of the classic bench such as --prompt or --prefill-max-batch-size)",
    )
    _add_switch(group, "--verbose", "print all figures, also by the names of other bench clients")
    _add_file(group, "--json", "write all figures to this file")
    _add_switch(group, "--details", "add the record of every request to --json")
    _add_file(
        group,
        "--output-file",
        "append each run as a line of JSON with the keys that the bench clients of SGLang and"
        " vLLM write",
        "FILE.jsonl",
    )
    _add_switch(
        group, "--save-result", "the same, into a file named after backend, rate, model and time"
    )
    group.add_argument(
        "--output-details",
        "--save-detailed",
        action="store_true",
        help="add lengths, times and errors of every request to --output-file",
    )
    _add_file(group, "--plot", "draw the first measured run", "FILE.png")
    _add_file(
        group,
        "--save-trace",
        "write the first measured run's requests; --trace and the same --seed repeat them",
    )
    add_goodput(group)
    _add_file(
        group,
        "--server-log",
        "log file of the server that the bench starts (default: standard error)",
    )
