"""ServerConfig: frozen dataclasses, and the file and command line that are made of their fields.

First --config FILE, a YAML map of flags, then the dataclass of all groups and its arguments.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quadriga import disk
from quadriga.errors import ConfigError
from quadriga.keywords import similar
from quadriga.programs import install_command
from quadriga.server.config.engine_args import (
    BY_CACHE,
    ModelArgs,
    ReplicaArgs,
    SchedulerArgs,
    WorkerArgs,
)
from quadriga.server.config.flags import (
    check_numbers,
    check_positive,
    checked_value,
    converted,
    flag,
    flag_fields,
    flag_name,
    metavar,
    missing_flag_advice,
    parser_of,
    value_type,
)
from quadriga.server.config.frontend_args import (
    API_KEY_VARIABLE,
    FrontendArgs,
    HttpArgs,
    TenantArgs,
    TraceArgs,
    is_loopback,
)
from quadriga.wire.client import PRIVATE_ENDPOINT

# --- --config FILE --------------------------------------------------------------------------------


_FLAGS = "flags, such as `max-batch-size: 32`"


def read_config(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file of flags.

    A key is a flag without its dashes, `max-batch-size` or `max_batch_size`. A list is
    the comma-separated items of a flag. Keys without a value are ignored, but for flags that
    protect the server.

    Args:
        path: the file.
        fields: dataclass fields of the flags, by their names and aliases.

    Returns:
        Values by field name.

    Raises:
        ConfigError: the file cannot be read, or has a key or a value that no flag can have.
    """
    values = {}
    for key, value in read_map("--config", path, _FLAGS).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{path}: there is no flag {key!r}{_suggestions(name, fields)}")
        field = fields[name]
        if value is None:
            if field.metadata["secures"]:
                values[field.name] = ""  # which is refused
            continue
        if name == field.metadata["alias"] and field.metadata["alias_value"]:
            if converted(f"{path}: {key}", value, bool):
                values[field.name] = field.metadata["alias_value"]
        else:
            value = _joined(value) if value_type(field.type) is str else value
            values[field.name] = checked_value(f"{path}: {key}", value, field)
    return values


def read_map(flag_of_file: str, path: Path, what: str) -> dict[Any, Any]:
    """Return the map of a YAML file, which may be empty.

    Args:
        flag_of_file: the flag that names the file.
        path: the file.
        what: what the map has, with an example.

    Raises:
        ConfigError: the file cannot be read, or is no map.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{flag_of_file} needs PyYAML, which is not installed: {install_command('serve')}"
        ) from None
    try:
        content = yaml.safe_load(disk.read_text(path))
    except OSError as error:
        raise ConfigError(f"{flag_of_file} {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a map of {what}")
    return content


def _suggestions(name: str, fields: Mapping[str, Any]) -> str:
    if (advice := missing_flag_advice(flag_name(name))) is not None:
        return f"; {advice}"
    near = similar(name, fields)
    return f"; near it: {', '.join(flag_name(n)[2:] for n in near)}" if near else ""


def _joined(value: Any) -> Any:
    """Return a list of texts and numbers, or one of them, as the text of the command line."""
    items = value if isinstance(value, list) else [value]
    is_text = all(isinstance(item, str | int | float) for item in items)
    return ",".join(map(str, items)) if is_text else value


# --- groups of flags, and the command line that is made of their fields ---------------------------


@dataclass(frozen=True, slots=True)
class DetokArgs:
    """Detokenization, token ids to text (detok_proc)."""

    stream_interval: int = flag(
        1, "tokens between two pieces of text; the first is sent at once", unit="TOKENS"
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "stream_interval")


@dataclass(frozen=True, slots=True)
class LaunchArgs:
    """Start, stop and logging (launcher.py)."""

    start_timeout: float = flag(
        600.0, "seconds within which every process must be ready", unit="SECONDS"
    )
    shutdown_timeout: float = flag(
        30.0, "seconds that open requests may go on after a signal", unit="SECONDS"
    )
    max_restarts: int = flag(
        10, "restarts of one process within five minutes; 0: the first death ends the server"
    )
    model_memory: float | None = flag(
        None, "memory of all loaded models: see docs/several-models.md (default: no bound)",
        unit="GIB",
    )  # fmt: skip
    model_turn: float = flag(
        60.0, "longest turn of a busy model while others wait for its memory", unit="SECONDS"
    )
    sleep_idle_seconds: float | None = flag(
        None, "time without a request after which a model is unloaded (default: never)",
        unit="SECONDS",
    )  # fmt: skip
    watchdog_timeout: float = flag(
        120.0,
        "seconds after which a process that does not answer, or a step that does not end, is killed"
        " and restarted; 0: never",
        unit="SECONDS",
    )
    log_level: str = flag("info", "smallest severity to log", ("debug", "info", "warning", "error"))
    log_format: str = flag(
        "text", "format of the log; json: one JSON object a line, without a status line",
        ("text", "json"),
    )  # fmt: skip
    log_requests: bool = flag(
        False, "log a line for each request at its end, or why it was refused; so does debug"
    )
    log_slow_requests: float | None = flag(
        None,
        "seconds from which a request is logged at its end, with the time of each of its stages"
        " (default: never)",
        unit="SECONDS",
    )
    log_stats_interval: float = flag(
        10.0,
        "seconds between two lines of the log with requests and throughput, while there is work and"
        " no live status line; 0: never",
        unit="SECONDS",
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "start_timeout", "log_slow_requests")
        check_positive(self, "model_memory", "model_turn", "sleep_idle_seconds")
        for name in (
            "shutdown_timeout", "max_restarts", "watchdog_timeout", "log_stats_interval",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more (it is {getattr(self, name)})")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All flags of a server, one group per process. `replace` makes a changed copy.

    The field `max_batch_size: int = flag(8, "…")` is the flag `--max-batch-size`. Every process
    takes the same flags, so that each can be started by itself and `ps` shows how it was started.
    """

    model: ModelArgs = ModelArgs()
    frontend: FrontendArgs = FrontendArgs()
    scheduler: SchedulerArgs = SchedulerArgs()
    worker: WorkerArgs = WorkerArgs()
    detok: DetokArgs = DetokArgs()
    http: HttpArgs = HttpArgs()
    tenants: TenantArgs = TenantArgs()
    replicas: ReplicaArgs = ReplicaArgs()
    traces: TraceArgs = TraceArgs()
    launch: LaunchArgs = LaunchArgs()

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        for group in self.groups():
            group.validate()
            check_numbers(group)
        replicas = self.replicas
        by_cache = replicas.survives_loss and replicas.load_balance_method == BY_CACHE
        if by_cache and self.scheduler.disable_radix_cache:
            raise ConfigError(
                "--load-balance-method cache-aware chooses by cached prefixes: leave"
                " --disable-radix-cache out, or add --load-balance-method least-loaded"
            )
        if self.worker.has_offload and self.scheduler.disable_radix_cache:
            raise ConfigError(
                f"{self.worker.offload_flags} keeps cached prefixes: leave --disable-radix-cache"
                " out"
            )
        self._check_pinned_adapters()
        if replicas.has_roles:
            self._check_roles()
        if self.scheduler.speculative_method == "self":
            self.worker.check_self_draft()
        self._check_doors()
        num_machines, tp = replicas.nnodes or 1, self.worker.tp
        if tp % num_machines:
            raise ConfigError(
                f"tp is {tp} and nnodes is {num_machines}: each machine has as many ranks as the"
                f" others; start with --tp {math.ceil(tp / num_machines) * num_machines}, or with"
                " another --nnodes"
            )
        if replicas.in_cluster and self.worker.kv_cache_dir:
            raise ConfigError(
                "--kv-cache-dir is a directory of one machine: leave it out with --cluster;"
                " --kv-offloading-size works"
            )
        if replicas.in_cluster and (self.scheduler.journal or self.scheduler.resume):
            raise ConfigError(
                "--journal is a directory of one machine, and with --cluster the requests of a lost"
                " machine go on from what the frontend has: leave --journal and --resume out"
            )

    def _check_pinned_adapters(self) -> None:
        """Raise ConfigError where no place is left for adapters that are not pinned."""
        pinned = [module.name for module in self.model.adapter_modules if module.pinned]
        if pinned and len(pinned) >= self.scheduler.max_loras:
            raise ConfigError(
                f"--lora-modules has {len(pinned)} pinned adapters, and --max-loras is"
                f" {self.scheduler.max_loras}, with one place for those that are not: set it to"
                f" {len(pinned) + 1} or more, or pin fewer"
            )

    def _check_roles(self) -> None:
        """Raise ConfigError where pages cannot move from the replicas that compute prompts."""
        for feature, is_set in (
            ("--disable-radix-cache", self.scheduler.disable_radix_cache),
            (f"--tp {self.worker.tp}", self.worker.tp > 1),
            ("--batching static", self.scheduler.batching == "static"),
        ):
            if is_set:
                raise ConfigError(
                    "prefill_replicas moves cached KV pages between replicas, which does not work"
                    f" with {feature}: leave one of both out"
                )

    def _check_doors(self) -> None:
        """Raise ConfigError for a port or a socket that is open to clients without a key.

        The port may be so on loopback; the ZeroMQ socket may not where HTTP clients need keys.
        """
        http, frontend = self.http, self.frontend
        if http.no_http or frontend.insecure:
            return
        if not (self.http_needs_keys or is_loopback(http.host)):
            raise ConfigError(
                f"host is {http.host}, which other machines may reach, and there are no keys: set"
                f" {API_KEY_VARIABLE}, or add --api-key KEY or --keys FILE, or add --insecure if"
                " every machine there may use it"
            )
        if self.http_needs_keys and frontend.is_open:
            raise ConfigError(
                f"endpoint is {frontend.endpoint}, where clients need no key, and HTTP clients need"
                " one: leave --endpoint out, or make it ipc:///PATH, so that only the server's user"
                " reaches it; or make keys with quadriga keygen DIR and add --curve-dir DIR, or add"
                " --insecure if every user of this machine may use it"
            )

    @property
    def http_needs_keys(self) -> bool:
        """Whether HTTP clients need a key."""
        return not self.http.no_http and bool(self.http.api_keys or self.tenants.keys)

    @property
    def data_dir(self) -> Path | None:
        """Directory of what outlives the server; None: nothing that the gateway keeps does."""
        if self.http.data_dir:
            return Path(self.http.data_dir)
        journal = self.scheduler.journal
        return Path(journal) / "data" if journal and not self.scheduler.no_journal else None

    def groups(self) -> list[Any]:
        """Return the groups of flags, one per process."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def replace(self, **flags: Any) -> "ServerConfig":
        """Return a copy with some fields set. Raise ConfigError for an unknown name."""
        groups = {}
        for field in dataclasses.fields(self):
            group = getattr(self, field.name)
            names = [f.name for f in dataclasses.fields(group) if f.name in flags]
            changes = {name: flags.pop(name) for name in names}
            groups[field.name] = dataclasses.replace(group, **changes)
        if flags:
            raise ConfigError(f"no such flag: {', '.join(sorted(flags))}")
        return ServerConfig(**groups)

    def to_argv(self) -> list[str]:
        """Return the flags that reproduce this config, without those at their default."""
        argv = []
        for group in self.groups():
            for field in flag_fields(group):
                value = getattr(group, field.name)
                if value == field.default:
                    continue
                name = flag_name(field.name)
                argv += [name] if value is True else [name, str(value)]
        return argv


def add_flags(
    parser: argparse.ArgumentParser,
    only: Collection[str] | None = None,
    repeatable: Collection[str] = (),
) -> None:
    """Add the flags of ServerConfig, --config and --help-all; absent flags stay out of the result.

    --help shows the flags that most operators need, --help-all all of them. `only` has the names of
    the flags to add; None adds all. A flag in `repeatable` may be given several times, and its
    value is a list.
    """
    others: list[tuple[argparse.Action, str]] = []
    parser.add_argument(
        "--help-all", action=_HelpAll, nargs=0, others=others, help="show all flags of the server"
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE.yaml",
        help="YAML map of the server's flags, without dashes; the command line takes precedence",
    )
    for group in ServerConfig().groups():
        fields = [f for f in flag_fields(group) if only is None or f.name in only]
        section = parser.add_argument_group((group.__doc__ or "").rstrip(".")) if fields else None
        for field in fields:
            action = _add_flag(section, field, field.name in repeatable)
            if not field.metadata["basic"]:
                others.append((action, action.help or ""))
                action.help = argparse.SUPPRESS


class _HelpAll(argparse.Action):
    """Shows the help of all flags, those that --help leaves out, too."""

    def __init__(self, *args: Any, others: list[tuple[argparse.Action, str]], **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._others = others

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action, text in self._others:
            action.help = text
        parser.print_help()
        parser.exit()


def _add_flag(section: Any, field: "dataclasses.Field[Any]", repeatable: bool) -> argparse.Action:
    data = field.metadata
    shown = help_text(field)
    if field.default not in (None, "", False):
        shown += f" (default: {field.default})"
    keywords: dict[str, Any] = {"help": shown, "default": argparse.SUPPRESS}
    names = [flag_name(field.name)]
    if data["alias_value"]:
        section.add_argument(
            flag_name(data["alias"]), action="store_const", dest=field.name,
            const=data["alias_value"], default=argparse.SUPPRESS, help=argparse.SUPPRESS,
        )  # fmt: skip
    elif data["alias"]:
        names.append(flag_name(data["alias"]))
    if field.type is bool:
        keywords["action"] = "store_true"
    else:
        keywords["type"] = parser_of(field.type)
        if repeatable:
            keywords["action"] = "append"
        if data["choices"]:
            keywords["choices"] = data["choices"]
        else:
            keywords["metavar"] = metavar(field)
    action: argparse.Action = section.add_argument(*names, **keywords)
    return action


def help_text(field: "dataclasses.Field[Any]") -> str:
    """Return the help of a flag, with an alias that means a value, but without the default."""
    text: str = field.metadata["help"]
    if field.metadata["alias_value"]:
        alias, value = field.metadata["alias"], field.metadata["alias_value"]
        text += f"; {flag_name(alias)} is short for {value}"
    return text


def named_models(namespace: argparse.Namespace) -> list[str]:
    """Return the values of --model in a parsed command line, where it may be repeatable or not."""
    adapters = _further_adapters(namespace)
    return [word for word in _words_of_model(namespace) if word not in adapters]


def _words_of_model(namespace: argparse.Namespace) -> list[str]:
    models: str | list[str] = getattr(namespace, "model", [])
    return [models] if isinstance(models, str) else models


def _further_adapters(namespace: argparse.Namespace) -> list[str]:
    """Return the items of `--lora-modules A=PATH B=PATH`, vLLM's form, behind the first one.

    The parser takes them for models, as a value has no blanks here.
    """
    if not getattr(namespace, "lora_modules", ""):
        return []
    return [word for word in _words_of_model(namespace) if re.match(r"\{|[^/]+=", word)]


def from_namespace(namespace: argparse.Namespace) -> ServerConfig:
    """Return the validated config of a parsed command line, and of the file of its --config.

    Names that are no flags of the server are ignored. Of several models the first is taken;
    `served_models.from_namespace` returns all.
    """
    fields = {field.name: field for field in flag_fields(*ServerConfig().groups())}
    aliases = {f.metadata["alias"]: f for f in fields.values() if f.metadata["alias"]}
    from_file = read_config(namespace.config, fields | aliases) if "config" in namespace else {}
    given = {name: value for name, value in vars(namespace).items() if name in fields}
    if models := named_models(namespace):
        given["model"] = models[0]
    else:
        given.pop("model", None)
    if adapters := _further_adapters(namespace):
        given["lora_modules"] = ",".join([given["lora_modules"], *adapters])
    for name, value in (from_file | given).items():
        if fields[name].metadata["secures"] and not str(value).strip(" ,"):
            raise ConfigError(
                f"{name} is {value!r}: an empty value would leave the server unprotected; give one,"
                f" or leave {flag_name(name)} out"
            )
    config = ServerConfig().replace(**from_file | given)
    if config.tenants.has_tenants:
        config = config.replace(fair_tenants=True)
    is_open = config.frontend.is_open and not config.frontend.insecure
    if config.http_needs_keys and is_open and "endpoint" not in from_file | given:
        config = config.replace(endpoint=PRIVATE_ENDPOINT)
    config.validate()
    return config


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def from_argv(argv: Sequence[str]) -> ServerConfig:
    """Return the validated config of a command line, such as that of `to_argv`.

    Raises:
        ConfigError: there is no such flag, or its value cannot work.
    """
    parser = _FlagParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    return from_namespace(parser.parse_args(argv))
