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

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
BUILTIN_MODEL = "smollm2-135m"


def flag(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also a command line flag."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


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
        _positive("context_length", self.context_length)

    @property
    def shown_name(self) -> str:
        return self.served_model_name or self.model


@dataclass(frozen=True, slots=True)
class FrontDoorArgs:
    """tokenizer_proc."""

    endpoint: str = flag(DEFAULT_ENDPOINT, "public ZeroMQ socket")
    tokenize_workers: int = flag(2, "threads that encode text")
    allow_auto_truncate: bool = flag(False, "keep the last tokens of a prompt that is too long")
    queue_timeout: float | None = flag(
        None, "seconds that a request may wait to be admitted (default: no limit)"
    )
    request_timeout: float | None = flag(
        None, "seconds that a request may take as a whole (default: no limit)"
    )

    def validate(self) -> None:
        _positive("tokenize_workers", self.tokenize_workers)
        _positive("queue_timeout", self.queue_timeout)
        _positive("request_timeout", self.request_timeout)
        # Not ipc: a second server would take the path over in silence.
        address = re.fullmatch(r"tcp://.+:(\d+)", self.endpoint)
        if address is None or not 1 <= int(address[1]) <= 65535:
            raise ConfigError(
                f"endpoint is {self.endpoint!r}: it must be tcp://ADDRESS:PORT with a port from 1"
                f" to 65535, for example {DEFAULT_ENDPOINT}"
            )


BATCH_MODES = ("prefill-first", "mixed", "decode-first", "alternate")
POLICIES = ("fcfs", "lpm", "dfs-weight", "pack", "priority", "shortest")


@dataclass(frozen=True, slots=True)
class SchedulerArgs:
    """scheduler_proc."""

    max_batch_size: int = flag(64, "requests in one decode step")
    prefill_max_batch_size: int | None = flag(
        None, "waiting requests that one step may admit (default: --max-batch-size)"
    )
    prefill_max_tokens: int = flag(16384, "prompt tokens that one prefill step may hold")
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens of one step; a longer prompt is computed in chunks of that size, -1: never"
        " (default: 512 on a CPU, 8192 on a GPU)",
    )
    max_running_requests: int = flag(256, "requests that hold a slot at the same time")
    max_queued_requests: int = flag(4096, "waiting requests; over it a request is refused at once")
    batch_mode: str = flag("mixed", "what a step computes: see docs/scheduling.md", BATCH_MODES)
    decode_first: bool = flag(False, "the same as --batch-mode decode-first")
    batching: str = flag(
        "continuous",
        "static: a batch is run to its end before the next is admitted (to compare against)",
        ("continuous", "static"),
    )
    schedule_policy: str = flag("fcfs", "order of the waiting queue", POLICIES)
    pack_lookahead: int | None = flag(
        None, "pack: how many waiting requests it looks at to fill a step (default: 32)"
    )
    pack_fifo_every: int | None = flag(
        None, "pack: every N-th round is first come, first served (default: 8)"
    )
    priority_preemption_threshold: int | None = flag(
        None,
        "priority: a waiting request whose priority is higher by so much takes the place of a"
        " running one (default: 10)",
    )
    fair_clients: bool = flag(
        False, "clients take turns (deficit round robin), whatever each of them has sent"
    )
    schedule_conservativeness: float = flag(1.0, "larger: admit less and retract less, in (0, 10]")
    disable_radix_cache: bool = flag(False, "do not reuse the KV of equal prompt beginnings")
    no_prefix_cache: bool = flag(False, "the same as --disable-radix-cache")
    plan_at_once: bool = flag(
        False, "plan a step as soon as there is room, not as late as the worker allows"
    )
    debug_retract_probability: float = flag(
        0.0, "for tests: retract a running request at random, so often a step, in [0, 1]"
    )

    def validate(self) -> None:
        for name in (
            "max_batch_size",
            "prefill_max_batch_size",
            "prefill_max_tokens",
            "max_running_requests",
            "max_queued_requests",
            "pack_lookahead",
            "pack_fifo_every",
            "priority_preemption_threshold",
        ):
            _positive(name, getattr(self, name))
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk != -1 and chunk <= 0:
            raise ConfigError(
                f"chunked_prefill_size must be positive, or -1 for whole prompts (it is {chunk})"
            )
        if not 0 < self.schedule_conservativeness <= 10:
            raise ConfigError(
                f"schedule_conservativeness is {self.schedule_conservativeness}:"
                " it must be above 0 and at most 10"
            )
        if not 0 <= self.debug_retract_probability <= 1:
            raise ConfigError(
                f"debug_retract_probability is {self.debug_retract_probability}:"
                " it must be from 0 to 1"
            )
        self._check_together()

    def _check_together(self) -> None:
        """ConfigError for flags that contradict each other, or of which one would do nothing."""
        mode = self.batch_mode
        if self.decode_first and mode not in (self.default("batch_mode"), "decode-first"):
            raise ConfigError(f"--decode-first contradicts --batch-mode {mode}: leave one out")
        if self.batching == "static" and (
            self.decode_first or mode not in (self.default("batch_mode"), "prefill-first")
        ):
            raise ConfigError(
                "--batching static prefills a batch and then decodes it: it contradicts"
                f" --batch-mode {'decode-first' if self.decode_first else mode}"
            )
        if not self.prefix_cache and self.schedule_policy in ("lpm", "dfs-weight"):
            raise ConfigError(
                f"--schedule-policy {self.schedule_policy} orders by cached prefixes:"
                " it needs the prefix cache, leave --disable-radix-cache out"
            )
        for name, policy in (
            ("pack_lookahead", "pack"),
            ("pack_fifo_every", "pack"),
            ("priority_preemption_threshold", "priority"),
        ):
            if getattr(self, name) is not None and self.schedule_policy != policy:
                raise ConfigError(
                    f"{flag_name(name)} has no effect with --schedule-policy"
                    f" {self.schedule_policy}: add --schedule-policy {policy}, or leave it out"
                )

    @classmethod
    def default(cls, name: str) -> Any:
        """The value of a flag that was not given."""
        return next(field.default for field in dataclasses.fields(cls) if field.name == name)

    @property
    def prefill_width(self) -> int:
        return self.prefill_max_batch_size or self.max_batch_size

    @property
    def mode(self) -> str:
        """--batch-mode, with --decode-first taken in; static batching prefills first."""
        if self.decode_first:
            return "decode-first"
        return "prefill-first" if self.batching == "static" else self.batch_mode

    @property
    def prefix_cache(self) -> bool:
        return not (self.disable_radix_cache or self.no_prefix_cache)

    def prefill_budget(self, device: str) -> int:
        """Prompt tokens that one step may hold."""
        chunk = self.chunk_size(device)
        return self.prefill_max_tokens if chunk is None else min(chunk, self.prefill_max_tokens)

    def chunk_size(self, device: str) -> int | None:
        """Tokens of the largest chunk; None where prompts are never cut."""
        if self.chunked_prefill_size is None:
            return 512 if device == "cpu" else 8192
        return None if self.chunked_prefill_size == -1 else self.chunked_prefill_size


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
    attention_backend: str = flag("torch", "attention over pages", ("torch",))
    worker_threads: int | None = flag(None, "CPU threads of the worker (default: by the cores)")

    def validate(self) -> None:
        _positive("page_size", self.page_size)
        _positive("max_total_tokens", self.max_total_tokens)
        _positive("worker_threads", self.worker_threads)
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"mem_fraction_static is {fraction}: it must be between 0 and 1")
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
        _positive("stream_interval", self.stream_interval)


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
    scheduler: SchedulerArgs = SchedulerArgs()
    worker: WorkerArgs = WorkerArgs()
    detok: DetokArgs = DetokArgs()
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


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


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


def _positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"{name} must be positive (it is {value})")
