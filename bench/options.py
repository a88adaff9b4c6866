"""The flags of the bench, beside those of a server."""

import argparse
import dataclasses
import math
from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench.metrics import Slo
from bench.trace import LENGTHS_FORM, Lengths, TraceSpec, generate, read_trace
from bench.workload import DEFAULT_PROMPT, Workload
from quadriga import config as server_flags
from quadriga.config import ServerConfig, flag_name
from quadriga.errors import ConfigError
from quadriga.sampling import MAX_SEED, SamplingParams

DESCRIPTION = """Measure a server as a streaming client sees it. Without --endpoint the bench starts
a server of its own, which takes the server's flags; with it, a running one is measured."""

SWITCHES = {
    "paged_attn": "ask for paged attention (it is always on)",
    "cuda_graph": "ask for CUDA graphs in decode",
}
"""Switches that stay with the bench until the server has a flag of that name."""

INFORMATIVE = ("endpoint", "model")
"""Server flags that are allowed beside a running server."""

TEXT_FLAGS = ("prompt", "prompt_repeats", "unique_prompts", "pretok")
INTERVAL_FLAGS = ("submit_interval_ms", "submit_schedule")
ARRIVAL_FLAGS = ("request_rate", "burstiness")
EXCLUDES = {
    "trace": (
        *("num_requests", "max_new_tokens", "random_input_len", *TEXT_FLAGS),
        *("prefix_groups", "prefix_len", "prefix_order", "turns", "think_time"),
        *(*INTERVAL_FLAGS, *ARRIVAL_FLAGS, "max_concurrency", "num_clients"),
    ),
    "random_input_len": ("prompt", "prompt_repeats"),
    "prefix_groups": ("unique_prompts",),
    "request_rate": INTERVAL_FLAGS,
    "max_concurrency": (*ARRIVAL_FLAGS, *INTERVAL_FLAGS),
}
"""A flag, and those that mean nothing beside it."""

NEEDS = {
    "details": ("json",),
    "burstiness": ("request_rate",),
    "prefix_groups": ("random_input_len",),
    "prefix_len": ("prefix_groups",),
    "prefix_order": ("prefix_groups",),
    "turns": ("random_input_len",),
    "think_time": ("turns", "max_concurrency"),
    "save_trace": ("trace", "random_input_len", "pretok"),
}
"""A flag, and those of which one must be given for it to mean something."""


@dataclass(frozen=True, slots=True)
class Options:
    """One bench, validated.

    server: the bench's own server; None: the one at `endpoint` is measured.
    model: as given on the command line, or "".
    spec: what the workload's requests were generated from; None: they are from a trace file.
    gap: seconds between two submits; None: by the clock.
    """

    endpoint: str
    server: ServerConfig | None
    model: str
    workload: Workload
    spec: TraceSpec | None
    gap: float | None
    params: SamplingParams
    truncate: bool | None
    pretok: bool
    warmup_runs: int
    repeat_runs: int
    slo: Slo
    asked: tuple[str, ...]
    json_path: Path | None
    details: bool
    save_trace: Path | None
    server_log: Path | None
    flags: dict[str, Any]


def parse(argv: list[str]) -> Options:
    """The options of a command line. ConfigError for flags that cannot work."""
    arguments, given = _arguments(argv)
    _check_numbers(arguments)
    _check_together(arguments, given)
    server_given = _server_flags_in(arguments)
    own = "endpoint" not in server_given
    server = server_flags.from_namespace(arguments) if own else None
    if not own:
        ServerConfig().replace(endpoint=arguments.endpoint).validate()
    spec = _spec(arguments) if arguments.trace is None else None
    return Options(
        endpoint="" if own else arguments.endpoint,
        server=server,
        model=server_given.get("model", ""),
        workload=_workload(arguments, spec),
        spec=spec,
        gap=_gap(arguments),
        params=SamplingParams(
            temperature=arguments.temperature,
            seed=arguments.seed,
            ignore_eos=arguments.no_stop_on_eos,
        ),
        truncate=True if arguments.truncate else None,
        pretok=arguments.pretok,
        warmup_runs=arguments.warmup_runs,
        repeat_runs=arguments.repeat_runs,
        slo=Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms),
        asked=tuple(name for name in SWITCHES if getattr(arguments, name, False)),
        json_path=arguments.json,
        details=arguments.details,
        save_trace=arguments.save_trace,
        server_log=arguments.server_log,
        flags={name: _as_json(value) for name, value in vars(arguments).items()},
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the forty lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows all flags")


def _arguments(argv: list[str]) -> tuple[Namespace, set[str]]:
    """Every flag's value, and the names of the flags that were given."""
    parser, unset = _parser(), object()
    defaults = vars(parser.parse_args([]))
    parsed = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(defaults, unset))))
    given = {name: value for name, value in parsed.items() if value is not unset}
    return Namespace(**{**defaults, **given}), set(given)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m bench.serving", description=DESCRIPTION, allow_abbrev=False)
    _add_load(parser.add_argument_group("what is sent"))
    _add_sharing(parser.add_argument_group("what requests have in common"))
    _add_pace(parser.add_argument_group("when it is sent"))
    _add_output(parser.add_argument_group("what comes out"))
    server_flags.add_flags(parser)
    switches = parser.add_argument_group("what the server shall use; the output says what it does")
    for name, text in SWITCHES.items():
        if name not in _server_field_names():
            switches.add_argument(flag_name(name), action="store_true", help=text)
    return parser


def _add_load(group: Any) -> None:
    group.add_argument("--prompt", help=f"text of every request (default: {DEFAULT_PROMPT!r})")
    group.add_argument("--prompt-repeats", type=int, default=1, help="repeat the text N times")
    group.add_argument(
        "--unique-prompts",
        action="store_true",
        help="no two requests share a prefix, so that no cache helps",
    )
    group.add_argument(
        "--random-input-len",
        metavar="SPEC",
        help=f"send random token ids in place of a text, so many: {LENGTHS_FORM}",
    )
    group.add_argument(
        "--pretok", action="store_true", help="send token ids, so that the server tokenises nothing"
    )
    group.add_argument(
        "--truncate", action="store_true", help="keep the last tokens of a prompt that is too long"
    )
    group.add_argument("--num-requests", type=int, default=32, help="(default: 32)")
    group.add_argument(
        "--max-new-tokens",
        metavar="SPEC",
        default="64",
        help=f"of each request: {LENGTHS_FORM} (default: 64)",
    )
    group.add_argument(
        "--no-stop-on-eos",
        action="store_true",
        help="every request generates all of its --max-new-tokens",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    group.add_argument("--seed", type=int, default=0, help="of sampling and of random prompts")


def _add_sharing(group: Any) -> None:
    group.add_argument(
        "--prefix-groups",
        type=int,
        default=0,
        metavar="G",
        help="groups of prompts, each with a random prefix of its own in common",
    )
    group.add_argument(
        "--prefix-len", type=int, default=0, metavar="P", help="tokens of such a prefix"
    )
    group.add_argument(
        "--prefix-order",
        choices=("shuffled", "grouped"),
        default="shuffled",
        help="whether the groups are mixed or come one after the other (default: shuffled)",
    )
    group.add_argument(
        "--turns",
        type=int,
        default=1,
        metavar="T",
        help="requests of a chat: each continues the one before, prompt and answer, with"
        " --random-input-len tokens more (default: 1)",
    )
    group.add_argument(
        "--think-time",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="from an answer to the next request of the chat, or of the closed loop (default: 0)",
    )
    group.add_argument("--num-clients", type=int, default=1, help="connections to spread over")


def _add_pace(group: Any) -> None:
    group.add_argument("--submit-interval-ms", type=float, default=0.0, help="(default: 0)")
    group.add_argument(
        "--submit-schedule",
        choices=("relative", "absolute"),
        default="relative",
        help="interval after the submit before, or by the clock from the start",
    )
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests (with --turns: chats) a second, at random times (default: inf, at once)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="of --request-rate: 1 is Poisson, less is burstier, inf is even (default: 1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="closed loop: N at a time, the next when one has ended",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="send what a trace file says, when it says so (format: bench/trace.py)",
    )
    group.add_argument(
        "--warmup-runs",
        type=int,
        default=1,
        help="runs with other prompts that are not measured (default: 1)",
    )
    group.add_argument("--repeat-runs", type=int, default=1, help="measured runs (default: 1)")


def _add_output(group: Any) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    group.add_argument(
        "--save-trace",
        type=Path,
        metavar="FILE",
        help="write what the first measured run sent; --trace sends it again, with the same --seed",
    )
    group.add_argument(
        "--slo-ttft-ms", type=float, metavar="MS", help="limit of TTFT, to report the goodput"
    )
    group.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="limit of TPOT, likewise")
    group.add_argument("--details", action="store_true", help="and the record of every request")
    group.add_argument(
        "--server-log",
        type=Path,
        metavar="FILE",
        help="log of the bench's own server (default: its standard error)",
    )


def _spec(arguments: Namespace) -> TraceSpec:
    random_input = arguments.random_input_len
    rate, burstiness = arguments.request_rate, arguments.burstiness
    if arguments.submit_schedule == "absolute" and arguments.submit_interval_ms > 0:
        rate, burstiness = 1000 / arguments.submit_interval_ms, math.inf
    return TraceSpec(
        num_requests=arguments.num_requests,
        output_len=Lengths.parse(arguments.max_new_tokens, "max_new_tokens"),
        input_len=Lengths.parse(random_input, "random_input_len") if random_input else None,
        request_rate=rate,
        burstiness=burstiness,
        max_concurrency=arguments.max_concurrency,
        prefix_groups=arguments.prefix_groups,
        prefix_len=arguments.prefix_len,
        shuffle_groups=arguments.prefix_order == "shuffled",
        turns=arguments.turns,
        think_time=arguments.think_time,
        num_clients=arguments.num_clients,
        seed=arguments.seed,
    )


def _workload(arguments: Namespace, spec: TraceSpec | None) -> Workload:
    text = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    sends_ids = spec is None or spec.input_len is not None
    return Workload(
        requests=read_trace(arguments.trace) if spec is None else list(generate(spec)),
        text=None if sends_ids else " ".join([text] * arguments.prompt_repeats),
        unique=arguments.unique_prompts,
        seed=arguments.seed,
    )


def _gap(arguments: Namespace) -> float | None:
    """Only an interval that is relative to the submit before is no matter of the clock."""
    by_the_clock = (
        arguments.trace is not None
        or arguments.request_rate < math.inf
        or arguments.max_concurrency is not None
        or arguments.submit_schedule == "absolute"
    )
    return None if by_the_clock else float(arguments.submit_interval_ms / 1000)


def _check_numbers(arguments: Namespace) -> None:
    for name in ("prompt_repeats", "repeat_runs", "slo_ttft_ms", "slo_tpot_ms"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
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
    for name in ("json", "save_trace", "server_log"):
        path = getattr(arguments, name)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag_name(name)} {path}: there is no directory {path.parent}")
    if "endpoint" in arguments:
        _refuse_server_flags(arguments)


def _refuse_server_flags(arguments: Namespace) -> None:
    idle = [flag_name(n) for n in _server_flags_in(arguments) if n not in INFORMATIVE]
    if arguments.server_log is not None:
        idle.append("--server-log")
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} would have no effect on the server that runs at"
            f" {arguments.endpoint}: leave them out, or leave --endpoint out to start a server"
        )


def _server_flags_in(arguments: Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(arguments).items() if k in _server_field_names()}


def _server_field_names() -> set[str]:
    config = ServerConfig()
    groups = [getattr(config, group.name) for group in dataclasses.fields(config)]
    return {field.name for group in groups for field in dataclasses.fields(group)}


def _as_json(value: Any) -> Any:
    """JSON knows no paths and nothing infinite."""
    plain = not isinstance(value, Path) and value != math.inf
    return value if plain else str(value)
