"""Flags of the frontend, and what they refuse."""

import ipaddress
import re
from dataclasses import dataclass

from quadriga.config.flags import check_positive, flag
from quadriga.errors import ConfigError
from quadriga.keywords import nearest

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
# A socket in the private directory of the run, whose path only the launcher's owner learns.
PRIVATE_ENDPOINT = "ipc"
# Values of --tool-call-parser and --reasoning-parser beside the names of known formats.
AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class FrontendArgs:
    """Frontend, text to token ids (tokenizer_proc)."""

    endpoint: str = flag(
        DEFAULT_ENDPOINT,
        "public ZeroMQ socket; ipc: one that only the program which starts the server can reach",
        unit="tcp://HOST:PORT",
        basic=True,
    )
    curve_dir: str = flag(
        "",
        "directory of keys, made by quadriga keygen: only clients whose key is there may connect",
        unit="DIR",
        basic=True,
        secures=True,
    )
    insecure: bool = flag(
        False, "serve other machines without keys: any client that reaches the socket may use it"
    )
    tokenize_workers: int = flag(2, "processes that encode long texts")
    default_max_tokens: int = flag(
        1024,
        "generated tokens of a request that sets no limit, or what the context leaves if less",
        unit="TOKENS",
        basic=True,
    )
    allow_auto_truncate: bool = flag(False, "cut a prompt that is too long to its last tokens")
    sampling_defaults: str = flag(
        "model",
        "source of temperature, top_k, top_p, min_p and repetition_penalty for requests without"
        " them. model: its generation_config.json; openai: 1, off, 1, 0, 1",
        ("model", "openai"),
    )
    tool_call_parser: str = flag(
        AUTO,
        "form of the model's tool calls: a name of docs/http.md, or none (auto: as the chat"
        " template writes them)",
    )
    reasoning_parser: str = flag(
        AUTO,
        "marks of the model's reasoning: a name of docs/http.md, or none (auto: as the chat"
        " template writes them)",
    )
    queue_timeout: float | None = flag(
        None, "seconds within which a request must be admitted (default: no limit)", unit="SECONDS"
    )
    request_timeout: float | None = flag(
        None, "seconds within which a request must end (default: no limit)", unit="SECONDS"
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "tokenize_workers", "default_max_tokens")
        check_positive(self, "queue_timeout", "request_timeout")
        _check_parsers(self.tool_call_parser, self.reasoning_parser)
        if self.endpoint == PRIVATE_ENDPOINT:
            return
        # A path is refused: a second server would silently take it over.
        address = re.fullmatch(r"tcp://.+:(\d+)", self.endpoint)
        if address is None or not 1 <= int(address[1]) <= 65535:
            raise ConfigError(
                f"endpoint is {self.endpoint!r}: it must be tcp://ADDRESS:PORT with a port from 1"
                f" to 65535, for example {DEFAULT_ENDPOINT}"
            )
        if not (self.curve_dir or self.insecure or is_loopback(_host_of(self.endpoint))):
            raise ConfigError(
                f"endpoint is {self.endpoint}, which other machines may reach, and there are no"
                " keys: make some with quadriga keygen DIR and add --curve-dir DIR, or add"
                " --insecure if every machine there may use it"
            )


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address, or a name, of a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for a value that is neither auto, none, nor the name of a known format."""
    if {tool_call_parser, reasoning_parser} <= {AUTO, NONE}:
        return
    from quadriga.known_formats import KNOWN_FORMATS

    formats = KNOWN_FORMATS.values()
    _check_parser("tool_call_parser", tool_call_parser, [f.source for f in formats if f.calls])
    _check_parser("reasoning_parser", reasoning_parser, [f.source for f in formats if f.reasoning])


def _check_parser(name: str, value: str, known: list[str]) -> None:
    names = [AUTO, NONE, *sorted(known)]
    if value not in names:
        raise ConfigError(
            f"{name} is {value!r}: it must be one of {', '.join(names)}{nearest(value, names)}"
        )
