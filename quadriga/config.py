"""ServerConfig: small frozen dataclasses, and the command line that is made of their fields.

A field `max_batch_size: int = flag(8, "…")` is the flag `--max-batch-size`. Every process takes
the same flags, so that each can be started by itself and `ps` shows how it was started.
"""

import argparse
import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

from quadriga.errors import ConfigError
from quadriga.flags import flag, flag_name, positive
from quadriga.http_args import HttpArgs
from quadriga.scheduler_args import SchedulerArgs

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
BUILTIN_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Which model, as every process must know it."""

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
    """tokenizer_proc."""

    endpoint: str = flag(DEFAULT_ENDPOINT, "public ZeroMQ socket")
    tokenize_workers: int = flag(2, "threads that encode text")
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


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """worker_proc."""

    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = flag(
        "auto",
        "auto: bfloat16 where the hardware multiplies it fast, else float32",
        ("auto", "float32", "bfloat16", "float16"),
    )
    page_size: int = flag(16, "tokens in one KV page")
    max_total_tokens: int | None = flag(None, "size of the KV pool in tokens")
    mem_fraction_static: float | None = flag(
        None, "share of the free memory for the KV pool, in (0, 1) (default: 0.8 on cuda, 0.2 else)"
    )
    attention_backend: str = flag(
        "auto",
        "native: kernels for a CPU, compiled at first use; torch: plain torch, anywhere (auto:"
        " native on a CPU where a C++ compiler is found)",
        ("auto", "native", "torch"),
    )
    quantization: str = flag(
        "none",
        "weights in 8 or 4 bits (groups of 32), inputs rounded to 8 bits as they are multiplied"
        " (gguf: with the very numbers of a quantised GGUF)",
        ("none", "int8", "int4", "gguf"),
    )
    kv_cache_dtype: str = flag(
        "auto", "keys and values: as --dtype, or in 8 bits, for twice the tokens", ("auto", "int8")
    )
    worker_threads: int | None = flag(None, "CPU threads of the worker (default: by the cores)")

    def validate(self) -> None:
        positive("page_size", self.page_size)
        positive("max_total_tokens", self.max_total_tokens)
        positive("worker_threads", self.worker_threads)
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"mem_fraction_static is {fraction}: it must be between 0 and 1")
        if self.kv_cache_dtype == "int8" and self.page_size % 16:
            raise ConfigError(
                f"kv_cache_dtype int8 needs a page_size that is a multiple of 16 (it is"
                f" {self.page_size})"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"max_total_tokens is {self.max_total_tokens}: it must be at least one page"
                f" of {self.page_size} tokens"
            )
        if self.max_total_tokens is not None and self.max_total_tokens % self.page_size:
            raise ConfigError(
                f"max_total_tokens is {self.max_total_tokens}: page_size {self.page_size} does not"
                f" divide it; {self.max_total_tokens // self.page_size * self.page_size} would fit"
            )


@dataclass(frozen=True, slots=True)
class DetokArgs:
    """detok_proc."""

    stream_interval: int = flag(1, "text is sent every N tokens; the first piece at once")

    def validate(self) -> None:
        positive("stream_interval", self.stream_interval)


@dataclass(frozen=True, slots=True)
class LaunchArgs:
    """launcher.py."""

    start_timeout: float = flag(600.0, "seconds until every process must be ready")
    shutdown_timeout: float = flag(30.0, "seconds that running requests may go on after a signal")
    log_level: str = flag("info", "how much to log", ("debug", "info", "warning", "error"))

    def validate(self) -> None:
        if not self.start_timeout > 0:
            raise ConfigError("start_timeout must be positive")
        if not self.shutdown_timeout >= 0:
            raise ConfigError("shutdown_timeout must be 0 or more")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All flags of a server. Never written to after start; `replace` makes a changed copy."""

    model: ModelArgs = ModelArgs()
    front_door: FrontDoorArgs = FrontDoorArgs()
    scheduler: SchedulerArgs = SchedulerArgs()  # noqa: RUF009 - frozen, like the others
    worker: WorkerArgs = WorkerArgs()
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
    """Add every flag of ServerConfig; absent ones stay out of the namespace."""
    for group in ServerConfig().groups():
        section = parser.add_argument_group(group.__doc__ or "")
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
        keywords["type"] = _value_type(field.type)
        if field.metadata["choices"]:
            keywords["choices"] = field.metadata["choices"]
        else:
            keywords["metavar"] = field.name.rsplit("_", 1)[-1].upper()
    section.add_argument(flag_name(field.name), **keywords)


def _value_type(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not types.NoneType)
    return annotation


def from_namespace(namespace: argparse.Namespace) -> ServerConfig:
    """The validated config of the flags in a parsed command line; others are left alone."""
    known = {f.name for group in ServerConfig().groups() for f in dataclasses.fields(group)}
    config = ServerConfig().replace(**{k: v for k, v in vars(namespace).items() if k in known})
    config.validate()
    return config
