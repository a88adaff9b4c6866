"""Check the command line of `bench.serving`: values, and combinations that are refused."""

import math
from argparse import Namespace
from collections.abc import Collection

from bench.cli.load_flags import LOAD_FLAGS, server_flags_in
from bench.client.backends import DEFAULT_BASE_URL
from quadriga.config.flags import flag_name
from quadriga.errors import ConfigError
from quadriga.sampling.limits import MAX_SEED

# Server flags that are allowed beside a running server.
CLIENT_SERVER_FLAGS = ("endpoint", "model", "tokenizer", "curve_dir")
OPENAI_SERVER_FLAGS = ("model", "tokenizer")
OPENAI_FLAGS = ("base_url", "openai_endpoint", "extra_body")
TEXT_FLAGS = ("prompt", "prompt_repeats", "unique_prompts", "pretok")
INTERVAL_FLAGS = ("submit_interval_ms", "submit_schedule")
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
# Flags of the classic bench, which imply its report and its load: one text for all requests, at
# once. Flags that every bench has, such as --model and --num-requests, imply nothing.
CLASSIC_FLAGS = {
    *TEXT_FLAGS,
    *INTERVAL_FLAGS,
    *("no_stop_on_eos", "max_batch_size", "prefill_max_batch_size", "disable_radix_cache"),
    *("paged_attn", "cuda_graph", "tokenize_workers", "stream_interval"),
    *("warmup_runs", "repeat_runs"),
}
# Flags that the classic bench does not have: beside them the classic flags imply nothing.
OTHER_LOAD_FLAGS = {
    *("backend", "random_input_len", "trace", "dataset_name"),
    *("request_rate", "max_concurrency"),
}
PROMPT_FLAGS = {*TEXT_FLAGS, "random_input_len", "trace", "dataset_name"}
PACE_FLAGS = {*INTERVAL_FLAGS, "request_rate", "max_concurrency", "burstiness"}
DEFAULT_CONCURRENCY = 8

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


def apply_dataset(arguments: Namespace, given: set[str]) -> None:
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


def apply_report(arguments: Namespace, given: Collection[str]) -> None:
    """Set the report, and the default load that goes with it.

    The classic report has the classic load. Otherwise `arguments.varied_prompts` is set unless
    prompts were asked for, and a load without any flags is a closed loop.
    """
    if arguments.report is None:
        is_classic = CLASSIC_FLAGS & set(given) and not OTHER_LOAD_FLAGS & set(given)
        arguments.report = "classic" if is_classic else "table"
    own_load = arguments.report == "table" and not PROMPT_FLAGS & set(given)
    arguments.varied_prompts = own_load
    if own_load and not PACE_FLAGS & set(given):
        arguments.max_concurrency = DEFAULT_CONCURRENCY
    arguments.short_warmup = "warmup_runs" not in given


def check(arguments: Namespace, given: Collection[str]) -> None:
    """Raise ConfigError for values and combinations that cannot work or have no effect."""
    _check_numbers(arguments)
    _check_together(arguments, given)
    _check_files(arguments)


def _check_numbers(arguments: Namespace) -> None:
    for name in ("prompt_repeats", "repeat_runs"):
        value = getattr(arguments, name)
        if not value > 0:
            raise ConfigError(f"{name} must be positive (it is {value})")
    for name in ("warmup_runs", "submit_interval_ms", "temperature"):
        value = getattr(arguments, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be 0 or more (it is {value})")
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise ConfigError(f"top_p must be above 0, and at most 1 (it is {arguments.top_p})")
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
    if arguments.backend == "openai":
        _refuse_server_flags(arguments, arguments.base_url or DEFAULT_BASE_URL, OPENAI_SERVER_FLAGS)
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
