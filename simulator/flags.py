"""The flags of a simulated server: its replicas, their memory, the cost model, the scheduler's."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quadriga.errors import ConfigError
from quadriga.server.config import engine_args, flags, server_config
from quadriga.server.config import server_config as server_flags
from quadriga.server.config.parser import CommandParser
from simulator import cost_model
from simulator.cost_model import CostModel
from simulator.roles import COPY_SHARE

# Server flags that change a simulation.
SERVER_FLAGS = {
    *(field.name for field in flags.flag_fields(engine_args.SchedulerArgs)),
    *("context_length", "allow_auto_truncate", "queue_timeout", "request_timeout"),
    *("page_size", "max_total_tokens"),
}


def world_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of a simulated server."""
    parser = CommandParser("flags of the server", add_help=False, allow_abbrev=False)
    add_flags_of_world(parser)
    return parser


def add_flags_of_world(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a simulated server to a parser."""
    add_world(parser.add_argument_group("server"))
    server_flags.add_flags(parser, only=SERVER_FLAGS)


def world_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags of a simulated server, or raise ConfigError."""
    return parsed(world_parser(), list(words))


def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse a command line, or raise ConfigError; a server's flag without effect is one."""
    arguments, unknown = parser.parse_known_args(argv)
    known = {
        flags.flag_name(field.name)
        for field in flags.flag_fields(*server_config.ServerConfig().groups())
    }
    idle = [word for word in unknown if word.split("=")[0] in known]
    if idle:
        remedy = "leave it out"
        if "--model" in idle or "--device" in idle:
            remedy += "; python -m bench.simulate.fit_cost_model measures a model on this machine"
        raise ConfigError(f"{', '.join(idle)} would change nothing in a simulation: {remedy}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def add_world(group: Any) -> None:
    """Add the flags of replicas, their memory and the cost model."""
    add = group.add_argument
    add("--replicas", type=int, default=1, metavar="R", help="number of servers")
    add(
        "--load-balance-method",
        choices=engine_args.LOAD_BALANCE_METHODS,
        default=engine_args.IN_TURN,
        help="choice of the replica for a request (default: round-robin)",
    )
    add("--prefill-replicas", type=flags.parser_of(engine_args.CountOrAuto), default=0, metavar="N",
        help="as many of them compute prompts for the others; auto: as many as the load asks for"
        " (default: 0)")  # fmt: skip
    add("--copy-share", type=float, default=COPY_SHARE, metavar="FRACTION",
        help="time in which such a replica stores or loads a page, in proportion to the time of its"
        f" computation (default: {COPY_SHARE}, as on a CPU)")  # fmt: skip
    add("--num-pages", type=int, metavar="N", help="KV pages of each replica")
    add(
        "--cost-model",
        type=Path,
        default=cost_model.DEFAULT,
        metavar="FILE",
        help=f"durations of steps (default: {cost_model.DEFAULT.name})",
    )


def config_of(arguments: argparse.Namespace) -> server_config.ServerConfig:
    """Return the server's configuration, or raise ConfigError."""
    if arguments.replicas <= 0:
        raise ConfigError(f"replicas must be positive (it is {arguments.replicas})")
    number = arguments.prefill_replicas
    if isinstance(number, int) and not 0 <= number < arguments.replicas:
        raise ConfigError(
            f"prefill_replicas is {arguments.prefill_replicas} and replicas is"
            f" {arguments.replicas}: at least one replica must be left for tokens"
        )
    if arguments.prefill_replicas:
        arguments = argparse.Namespace(**vars(arguments), dp=arguments.replicas)
    return server_flags.from_namespace(arguments)


def num_pages_of(
    arguments: argparse.Namespace, config: server_config.ServerConfig, model: CostModel
) -> int:
    """Return --num-pages, or the pages of --max-total-tokens or of the measured machine."""
    if arguments.num_pages is None:
        tokens = config.worker.max_total_tokens or model.measured_on.max_total_tokens
        return tokens // config.worker.page_size
    if config.worker.max_total_tokens is not None:
        raise ConfigError("--num-pages and --max-total-tokens set the same value: leave one out")
    if arguments.num_pages <= 0:
        raise ConfigError(f"num_pages must be positive (it is {arguments.num_pages})")
    return int(arguments.num_pages)


def model_of(arguments: argparse.Namespace, **changes: Any) -> CostModel:
    """Return the cost model of the flags, with other facts about its worker."""
    model = cost_model.load(arguments.cost_model)
    on = msgspec.structs.replace(model.measured_on, **changes)
    return msgspec.structs.replace(model, measured_on=on)


def source_of(path: Path, model: CostModel) -> str:
    """Return where a cost model is from, in a line."""
    on = model.measured_on
    threads = f", {on.threads} threads" if on.device == "cpu" else ""
    return f"{path.stem} ({on.model}, {on.dtype}, {on.device}{threads}, {on.date})"
