"""ServerConfig: small frozen dataclasses, and the command line that is made of their fields.

A field `max_batch_size: int = flag(8, "…")` is the flag `--max-batch-size`. Every process takes
the same flags, so that each can be started by itself and `ps` shows how it was started.
"""

import argparse
import dataclasses
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.config.config_file import read_config
from quadriga.config.fault_args import parse_faults
from quadriga.config.flags import flag, flag_name, positive, value_type
from quadriga.config.http_args import HttpArgs
from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
BUILTIN_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The model, as every process must know it."""

    model: str = flag(
        BUILTIN_MODEL, "Hub id, directory, .gguf file, gpt2 and its sizes, or a built-in name"
    )
    served_model_name: str = flag("", "name to show to clients (default: --model)")
    load_format: str = flag(
        "auto", "dummy: random weights for a known architecture", ("auto", "dummy")
    )
    context_length: int | None = flag(None, "serve a shorter context than the model's own (tokens)")

    def validate(self) -> None:
        positive("context_length", self.context_length)

    @property
    def shown_name(self) -> str:
        return self.served_model_name or self.model


@dataclass(frozen=True, slots=True)
class FrontDoorArgs:
    """The front door, texts to ids (tokenizer_proc)."""

    endpoint: str = flag(DEFAULT_ENDPOINT, "public ZeroMQ socket")
    curve_dir: str = flag(
        "", "the server's keys, made by quadriga keygen: only clients with a key there may connect"
    )
    insecure: bool = flag(
        False, "serve other machines without keys: whoever reaches the socket may use it"
    )
    tokenize_workers: int = flag(2, "processes that encode long texts")
    allow_auto_truncate: bool = flag(False, "keep the last tokens of a prompt that is too long")
    sampling_defaults: str = flag(
        "model",
        "where temperature, top_k, top_p, min_p and repetition_penalty come from if a request has"
        " none: the model's generation_config.json, or openai: 1, off, 1, 0, 1",
        ("model", "openai"),
    )
    queue_timeout: float | None = flag(
        None, "seconds that a request may wait to be admitted (default: no limit)"
    )
    request_timeout: float | None = flag(
        None, "seconds that a request may take as a whole (default: no limit)"
    )

    def validate(self) -> None:
        positive("tokenize_workers", self.tokenize_workers)
        positive("queue_timeout", self.queue_timeout)
        positive("request_timeout", self.request_timeout)
        # Not ipc: a second server would take the path over in silence.
        address = re.fullmatch(r"tcp://.+:(\d+)", self.endpoint)
        if address is None or not 1 <= int(address[1]) <= 65535:
            raise ConfigError(
                f"endpoint is {self.endpoint!r}: it must be tcp://ADDRESS:PORT with a port from 1"
                f" to 65535, for example {DEFAULT_ENDPOINT}"
            )
        if not (self.curve_dir or self.insecure or _is_loopback(self.endpoint)):
            raise ConfigError(
                f"endpoint is {self.endpoint}, which other machines may reach, and there are no"
                " keys: make some with quadriga keygen DIR and add --curve-dir DIR, or add"
                " --insecure if everybody there may use it"
            )


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class DetokArgs:
    """Ids to texts (detok_proc)."""

    stream_interval: int = flag(1, "text is sent every N tokens; the first piece at once")

    def validate(self) -> None:
        positive("stream_interval", self.stream_interval)


@dataclass(frozen=True, slots=True)
class LaunchArgs:
    """Start, stop, and what is shown (launcher.py)."""

    start_timeout: float = flag(600.0, "seconds until every process must be ready")
    shutdown_timeout: float = flag(30.0, "seconds that running requests may go on after a signal")
    max_restarts: int = flag(
        10,
        "how often one process that died is started again within five minutes; 0: any death ends"
        " the server",
    )
    watchdog_timeout: float = flag(
        120.0,
        "seconds after which a process that does not answer, or a step that does not end, counts as"
        " dead; 0: never",
    )
    fault: str = flag(
        "", "for tests: what goes wrong on purpose, for example kill:worker:after=100"
    )
    log_level: str = flag("info", "how much to log", ("debug", "info", "warning", "error"))
    no_status_line: bool = flag(False, "no live line of what the server does, on a terminal")

    def validate(self) -> None:
        if not self.start_timeout > 0:
            raise ConfigError("start_timeout must be positive")
        if not self.shutdown_timeout >= 0:
            raise ConfigError("shutdown_timeout must be 0 or more")
        parse_faults(self.fault)
        for name in ("max_restarts", "watchdog_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more (it is {getattr(self, name)})")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All flags of a server. Never written to after start; `replace` makes a changed copy."""

    model: ModelArgs = ModelArgs()
    front_door: FrontDoorArgs = FrontDoorArgs()
    scheduler: SchedulerArgs = SchedulerArgs()  # noqa: RUF009 - frozen, like the others
    worker: WorkerArgs = WorkerArgs()  # noqa: RUF009 - frozen, like the others
    detok: DetokArgs = DetokArgs()
    http: HttpArgs = HttpArgs()  # noqa: RUF009 - frozen, like the others
    launch: LaunchArgs = LaunchArgs()

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        for group in self.groups():
            group.validate()

    def groups(self) -> list[Any]:
        """The groups of flags, one per process."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def replace(self, **flags: Any) -> "ServerConfig":
        """A copy with some flags set, whichever group they belong to."""
        groups = {}
        for field in dataclasses.fields(self):
            group = getattr(self, field.name)
            own = {f.name: flags.pop(f.name) for f in dataclasses.fields(group) if f.name in flags}
            groups[field.name] = dataclasses.replace(group, **own)
        if flags:
            raise ConfigError(f"no such flag: {', '.join(sorted(flags))}")
        return ServerConfig(**groups)

    def to_argv(self) -> list[str]:
        """The flags that make this config again, without those at their default."""
        argv = []
        for group in self.groups():
            for field in dataclasses.fields(group):
                value = getattr(group, field.name)
                if value == field.default:
                    continue
                name = flag_name(field.name)
                argv += [name] if value is True else [name, str(value)]
        return argv


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of ServerConfig, and --config; absent ones stay out of the namespace."""
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE.yaml",
        help="a map of the server's flags, as keys without the dashes; the command line wins",
    )
    for group in ServerConfig().groups():
        section = parser.add_argument_group((group.__doc__ or "").rstrip("."))
        for field in dataclasses.fields(group):
            _add_flag(section, field)


def _add_flag(section: Any, field: "dataclasses.Field[Any]") -> None:
    text = field.metadata["help"]
    if field.default not in (None, "", False):
        text += f" (default: {field.default})"
    keywords: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
    if field.type is bool:
        keywords["action"] = "store_true"
    else:
        keywords["type"] = value_type(field.type)
        if field.metadata["choices"]:
            keywords["choices"] = field.metadata["choices"]
        else:
            keywords["metavar"] = field.name.rsplit("_", 1)[-1].upper()
    section.add_argument(flag_name(field.name), **keywords)


def from_namespace(namespace: argparse.Namespace) -> ServerConfig:
    """The validated config of the flags in a parsed command line; others are left alone. What it
    does not say, the file of its --config does."""
    known = {f.name: f for group in ServerConfig().groups() for f in dataclasses.fields(group)}
    of_file = read_config(namespace.config, known) if "config" in namespace else {}
    given = {name: value for name, value in vars(namespace).items() if name in known}
    config = ServerConfig().replace(**of_file | given)
    config.validate()
    return config
