"""Parser of --fault; runtime/fault_injection.py injects the faults."""

from dataclasses import dataclass
from typing import Any

from quadriga.errors import ConfigError

PROCESSES = ("worker", "scheduler", "detok", "tokenizer")
SIGNALS = {"kill": "SIGKILL", "segv": "SIGSEGV", "stop": "SIGSTOP"}
KINDS = (*SIGNALS, "delay", "drop", "retract")
OPTIONS = ("after", "every", "token", "ms")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to inject, at every message unless an option says otherwise.

    Attributes:
        kind: one of KINDS.
        process: the process that receives the messages, one of PROCESSES.
        after: number of the only message that triggers it, counted from 1 at the process's start.
        every: trigger at each message whose number is a multiple of this one.
        token: trigger at each plan with a new request whose first token this is.
        ms: duration of a delay.
    """

    kind: str
    process: str
    after: int = 0
    every: int = 1
    token: int | None = None
    ms: float = 10.0


def parse_faults(text: str) -> list[Fault]:
    """Parse comma-separated faults, each KIND:PROCESS[:OPTION=N…]. Raise ConfigError."""
    return [_parse(part) for part in text.split(",") if part]


def _parse(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    process, *options = rest.split(":")
    if kind not in KINDS or process not in PROCESSES:
        raise ConfigError(
            f"fault is {text!r}: it must be KIND:PROCESS, with a kind of {', '.join(KINDS)} and a"
            f" process of {', '.join(PROCESSES)}"
        )
    if kind == "retract" and process != "scheduler":
        raise ConfigError(f"fault is {text!r}: requests are retracted by the scheduler only")
    values: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in OPTIONS or not value.removesuffix("steps").isdigit():
            raise ConfigError(f"fault has {option!r}: {'=N, '.join(OPTIONS)}=N are known")
        values[key] = int(value.removesuffix("steps"))
    if not values.get("every", 1):
        raise ConfigError(f"fault is {text!r}: every must be at least 1")
    return Fault(kind, process, **values)
