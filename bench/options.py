"""The flags of the bench, beside those of a server."""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench.workload import DEFAULT_PROMPT, Schedule, Workload
from quadriga import config as server_flags
from quadriga.config import ServerConfig, flag_name
from quadriga.errors import ConfigError
from quadriga.sampling import MAX_SEED, SamplingParams

DESCRIPTION = """Measure a server as a streaming client sees it. Without --endpoint the bench starts
a server of its own, which takes the server's flags; with it, a running one is measured."""

SWITCHES = {
    "paged_attn": "ask for paged attention (it is always on)",
    "cuda_graph": "ask for CUDA graphs in decode",
    "no_prefix_cache": "ask for a server without prefix cache",
}
"""Switches that stay with the bench until the server has a flag of that name."""

INFORMATIVE = ("endpoint", "model")
"""Server flags that are allowed beside a running server."""


@dataclass(frozen=True, slots=True)
class Options:
    """One bench, validated.

    server: the bench's own server; None: the one at `endpoint` is measured.
    model: as given on the command line, or "".
    """

    endpoint: str
    server: ServerConfig | None
    model: str
    workload: Workload
    schedule: Schedule
    params: SamplingParams
    truncate: bool | None
    pretok: bool
    warmup_runs: int
    repeat_runs: int
    num_clients: int
    asked: tuple[str, ...]
    json_path: Path | None
    details: bool
    server_log: Path | None
    flags: dict[str, Any]


def parse(argv: list[str]) -> Options:
    """The options of a command line. ConfigError for flags that cannot work."""
    arguments = _parser().parse_args(argv)
    _check_numbers(arguments)
    _check_together(arguments)
    given = _server_flags_in(arguments)
    own = "endpoint" not in given
    server = server_flags.from_namespace(arguments) if own else None
    if not own:
        ServerConfig().replace(endpoint=arguments.endpoint).validate()
    return Options(
        endpoint="" if own else arguments.endpoint,
        server=server,
        model=given.get("model", ""),
        workload=_workload(arguments),
        schedule=Schedule(
            arguments.submit_interval_ms / 1000, arguments.submit_schedule == "absolute"
        ),
        params=SamplingParams(
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            ignore_eos=arguments.no_stop_on_eos,
        ),
        truncate=True if arguments.truncate else None,
        pretok=arguments.pretok,
        warmup_runs=arguments.warmup_runs,
        repeat_runs=arguments.repeat_runs,
        num_clients=arguments.num_clients,
        asked=tuple(name for name in SWITCHES if getattr(arguments, name, False)),
        json_path=arguments.json,
        details=arguments.details,
        server_log=arguments.server_log,
        flags={k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the forty lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help shows all flags")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m bench.serving", description=DESCRIPTION, allow_abbrev=False)
    _add_load(parser.add_argument_group("what is sent"))
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
        type=int,
        metavar="N",
        help="send N random token ids in place of a text",
    )
    group.add_argument(
        "--pretok", action="store_true", help="send token ids, so that the server tokenises nothing"
    )
    group.add_argument(
        "--truncate", action="store_true", help="keep the last tokens of a prompt that is too long"
    )
    group.add_argument("--num-requests", type=int, default=32, help="(default: 32)")
    group.add_argument("--max-new-tokens", type=int, default=64, help="(default: 64)")
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
    group.add_argument("--num-clients", type=int, default=1, help="connections to spread over")
    group.add_argument(
        "--warmup-runs",
        type=int,
        default=1,
        help="runs with other prompts that are not measured (default: 1)",
    )
    group.add_argument("--repeat-runs", type=int, default=1, help="measured runs (default: 1)")


def _add_output(group: Any) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    group.add_argument("--details", action="store_true", help="and the record of every request")
    group.add_argument(
        "--server-log",
        type=Path,
        metavar="FILE",
        help="log of the bench's own server (default: its standard error)",
    )


def _workload(arguments: argparse.Namespace) -> Workload:
    text = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    return Workload(
        count=arguments.num_requests,
        text=" ".join([text] * arguments.prompt_repeats),
        unique=arguments.unique_prompts,
        random_ids=arguments.random_input_len,
        seed=arguments.seed,
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    positive = (
        "num_requests",
        "max_new_tokens",
        "prompt_repeats",
        "repeat_runs",
        "num_clients",
        "random_input_len",
    )
    for name in positive:
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} must be positive (it is {value})")
    for name in ("warmup_runs", "submit_interval_ms", "temperature"):
        value = getattr(arguments, name)
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name} must be 0 or more (it is {value})")
    if not 0 <= arguments.seed <= MAX_SEED:
        raise ConfigError(f"seed must be from 0 to {MAX_SEED} (it is {arguments.seed})")


def _check_together(arguments: argparse.Namespace) -> None:
    if arguments.random_input_len is not None and (
        arguments.prompt is not None or arguments.prompt_repeats != 1
    ):
        raise ConfigError(
            "--random-input-len replaces the text: leave --prompt and --prompt-repeats out"
        )
    if arguments.details and arguments.json is None:
        raise ConfigError("--details go into a file: add --json FILE")
    for name in ("json", "server_log"):
        path = getattr(arguments, name)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag_name(name)} {path}: there is no directory {path.parent}")
    if "endpoint" in arguments:
        _refuse_server_flags(arguments)


def _refuse_server_flags(arguments: argparse.Namespace) -> None:
    idle = [flag_name(n) for n in _server_flags_in(arguments) if n not in INFORMATIVE]
    if arguments.server_log is not None:
        idle.append("--server-log")
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} would have no effect on the server that runs at"
            f" {arguments.endpoint}: leave them out, or leave --endpoint out to start a server"
        )


def _server_flags_in(arguments: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(arguments).items() if k in _server_field_names()}


def _server_field_names() -> set[str]:
    config = ServerConfig()
    groups = [getattr(config, group.name) for group in dataclasses.fields(config)]
    return {field.name for group in groups for field in dataclasses.fields(group)}
