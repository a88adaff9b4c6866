"""The parts that lines of the request log have in common, whichever process writes them.

A line has ids, the outcome, token counts and times; never token ids or keys, and text of a client
only where the reason of a refusal quotes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quadriga.config.server_config import LaunchArgs
from quadriga.runtime.logs import JSON

# Longest part of a line that a client can choose, such as the path.
MAX_LOGGED_CHARS = 120
# A reason quotes limits and remedies beside what the client sent.
MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class RequestLogLevel:
    """Which requests are logged.

    Attributes:
        logs_all: every request.
        slow_s: seconds from which a request is logged as slow, with its stages; None: never.
        is_json: the log is JSON, which has the scheduler's part of requests by HTTP, too.
    """

    logs_all: bool = False
    slow_s: float | None = None
    is_json: bool = False

    @classmethod
    def of(cls, args: LaunchArgs) -> "RequestLogLevel":
        """Return what the flags ask for."""
        logs_all = args.log_requests or args.log_level == "debug"
        return cls(logs_all, args.log_slow_requests, args.log_format == JSON)

    @property
    def is_off(self) -> bool:
        """Whether no request is logged."""
        return not self.logs_all and self.slow_s is None

    def is_slow(self, seconds: float) -> bool:
        """Return whether a request of this duration is slow."""
        return self.slow_s is not None and seconds >= self.slow_s


def in_a_line(text: str, max_chars: int = MAX_LOGGED_CHARS) -> str:
    """Return a client's text shortened and without line breaks and control characters."""
    return repr(text[:max_chars])[1:-1]


def token_counts(num_prompt: int, num_cached: int, num_generated: int) -> list[str]:
    """Return the parts of a line with the numbers of tokens."""
    return [f"prompt {num_prompt} tokens, {num_cached} cached", f"generated {num_generated}"]


def first_token_times(queued_s: float, first_token_s: float) -> list[str]:
    """Return the parts of a line with the seconds in the queue and to the first token."""
    return [f"queued {max(0.0, queued_s):.3f} s", f"first token {first_token_s:.3f} s"]


def seconds_of(stages: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of each stage, as the JSON log has them."""
    return {name: round(max(0.0, seconds), 6) for name, seconds in stages}


def stages_text(stages: Iterable[tuple[str, float]]) -> str:
    """Return the part of a slow request's line with the seconds that it spent in each stage."""
    return "stages: " + ", ".join(f"{name} {max(0.0, s):.3f} s" for name, s in stages)
