"""The requests of a server's JSON log, as a load and as what the server measured."""

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.load.trace import TraceRequest
from bench.metrics.percentiles import Percentiles, spread
from quadriga.errors import ConfigError

EVENTS = ("request", "scheduled")  # the scheduler's line of a choice, by ZeroMQ and by HTTP
SHARED_SEGMENT = 0  # the text of all cached prefixes


class LogLine(msgspec.Struct):
    """A line of docs/logs.md, as far as it is used here."""

    time: str = ""
    process: str = ""
    event: str = ""
    client: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None
    stages_s: dict[str, float] = {}
    priority: int = 0
    retractions: int = 0


class LoggedRequest(NamedTuple):
    """A choice that has ended, and when it arrived, in Unix seconds."""

    arrived_at: float
    line: LogLine


class MeasuredLoad(NamedTuple):
    """What a server measured. Spreads are in ms, as those of a simulation.

    Attributes:
        duration: seconds from the first arrival to the last end.
        throughput: generated tokens per second.
    """

    duration: float
    throughput: float
    queue_wait: Percentiles | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    latency: Percentiles | None
    cached_tokens: int
    retractions: int


def read_server_log(path: Path, last_s: float | None = None) -> list[LoggedRequest]:
    """Return the requests of a log that generated tokens, by their arrival.

    Args:
        path: what a server with --log-format json and --log-requests wrote.
        last_s: only the requests that arrived in so many seconds before the last arrival.

    Raises:
        ConfigError: the file cannot be read, or has no such request.
    """
    try:
        with path.open("rb") as file:
            lines = [line for text in file if (line := _line(text)) is not None]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(
            f"{path} has no lines of requests: start the server with --log-format json and"
            " --log-requests"
        )
    requests = [LoggedRequest(_unix_s(line.time) - line.seconds, line) for line in lines]
    requests.sort(key=lambda request: request.arrived_at)
    begins_at = 0.0 if last_s is None else requests[-1].arrived_at - last_s
    return [request for request in requests if request.arrived_at >= begins_at]


def _line(text: bytes) -> LogLine | None:
    """Return a line about a request that generated tokens, else None."""
    if not text.startswith(b"{"):
        return None
    try:
        line = _decode(text)
    except msgspec.DecodeError:
        return None
    is_request = line.process.startswith("scheduler_proc") and line.event in EVENTS
    return line if is_request and line.generated_tokens and line.prompt_tokens else None


_decode = msgspec.json.Decoder(LogLine).decode


def _unix_s(time: str) -> float:
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def load_of(requests: list[LoggedRequest]) -> list[TraceRequest]:
    """Return the load of logged requests.

    The log has no texts: a prompt begins with as many tokens of one common text as were cached, and
    goes on with tokens of its own.
    """
    began_at = requests[0].arrived_at
    clients: dict[str, int] = {}
    load = []
    for number, (arrived_at, line) in enumerate(requests, start=SHARED_SEGMENT + 1):
        num_own = line.prompt_tokens - line.cached_tokens
        parts = ((SHARED_SEGMENT, line.cached_tokens), (number, num_own))
        load.append(
            TraceRequest(
                at=arrived_at - began_at,
                segments=tuple(part for part in parts if part[1] > 0),
                max_new_tokens=line.generated_tokens,
                client=clients.setdefault(line.client, len(clients)),
                priority=line.priority,
            )
        )
    return load


def measured(requests: list[LoggedRequest]) -> MeasuredLoad:
    """Return what the server measured of logged requests."""
    lines = [request.line for request in requests]
    ends_at = max(request.arrived_at + request.line.seconds for request in requests)
    duration = ends_at - requests[0].arrived_at
    num_tokens = sum(line.generated_tokens for line in lines)
    return MeasuredLoad(
        duration=duration,
        throughput=num_tokens / duration if duration else 0.0,
        queue_wait=spread(line.stages_s["queue"] for line in lines if "queue" in line.stages_s),
        ttft=spread(line.first_token_s for line in lines if line.first_token_s is not None),
        tpot=spread(
            line.stages_s["decode"] / (line.generated_tokens - 1)
            for line in lines
            if "decode" in line.stages_s and line.generated_tokens > 1
        ),
        latency=spread(line.seconds for line in lines),
        cached_tokens=sum(line.cached_tokens for line in lines),
        retractions=sum(line.retractions for line in lines),
    )
