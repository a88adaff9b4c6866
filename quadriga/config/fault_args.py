"""--fault as it is written on the command line; fault_injection.py does what it says."""

from dataclasses import dataclass
from typing import Any

from quadriga.errors import ConfigError

PROCESSES = ("worker", "scheduler", "detok", "tokenizer")
SIGNALS = {"kill": "SIGKILL", "segv": "SIGSEGV", "stop": "SIGSTOP"}
KINDS = (*SIGNALS, "delay", "drop", "retract")
OPTIONS = ("after", "every", "token", "ms")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. after: at this message of those that the process receives, counted
    from its start; every: at each of so many; token: at each plan that brings a request which
    begins with it; none of the three: at each message. ms: how long a delay lasts."""

    kind: str
    process: str
    after: int = 0
    every: int = 1
    token: int | None = None
    ms: float = 10.0


def parse_faults(text: str) -> list[Fault]:
    """KIND:PROCESS[:OPTION=N…], several with commas between. Raises ConfigError."""
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
