"""Flags of what clients reach: the frontend, the web gateway, tenants and traces.

Each class is one group of docs/configuration.md, and validates its own flags.
"""

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from quadriga.errors import ConfigError
from quadriga.keywords import nearest
from quadriga.sampling.pooling import POOLINGS
from quadriga.server.config.flags import check_positive, flag
from quadriga.wire.client import DEFAULT_ENDPOINT, PRIVATE_ENDPOINT

# Values of --tool-call-parser and --reasoning-parser beside the names of known formats.
AUTO = "auto"
NONE = "none"
# After a value of --tool-call-parser other than none: calls have that form and no other.
EXACT = ":exact"


@dataclass(frozen=True, slots=True)
class FrontendArgs:
    """Frontend, text to token ids (tokenizer_proc)."""

    endpoint: str = flag(
        DEFAULT_ENDPOINT,
        "public ZeroMQ socket: tcp://HOST:PORT; ipc:///PATH, a file that only the server's user may"
        " open; or ipc, a file in the private directory of the run (default where HTTP clients need"
        " a key and ZeroMQ clients need none)",
        unit="ADDRESS",
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
        False,
        "serve without keys where --host or --endpoint would be refused: any client that reaches"
        " the port or the ZeroMQ socket may use the server",
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
        "form of the model's tool calls: a name of docs/tools.md, or none (auto: as the chat"
        " template writes them); with :exact after it, plain JSON is not a call, too",
    )
    reasoning_parser: str = flag(
        AUTO,
        "marks of the model's reasoning: a name of docs/tools.md, or none (auto: as the chat"
        " template writes them)",
    )
    pooling: str = flag(
        "",
        "give embeddings, too, made of the hidden states of a text: that of its last token, their"
        " mean, their mean weighted by position, or that of its first token (default: none)",
        POOLINGS,
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
        if self.endpoint.startswith("ipc:"):
            self._check_path()
            return
        address = re.fullmatch(r"tcp://.+:(\d+)", self.endpoint)
        if address is None or not 1 <= int(address[1]) <= 65535:
            raise ConfigError(
                f"endpoint is {self.endpoint!r}: it must be tcp://ADDRESS:PORT with a port from 1"
                f" to 65535, for example {DEFAULT_ENDPOINT}; or ipc:///PATH, or ipc"
            )
        if not (self.curve_dir or self.insecure or is_loopback(_host_of(self.endpoint))):
            raise ConfigError(
                f"endpoint is {self.endpoint}, which other machines may reach, and there are no"
                " keys: make some with quadriga keygen DIR and add --curve-dir DIR, or add"
                " --insecure if every machine there may use it"
            )

    def _check_path(self) -> None:
        path = self.endpoint.removeprefix("ipc://")
        if not (self.endpoint.startswith("ipc://") and os.path.isabs(path)) or path.endswith("/"):
            raise ConfigError(
                f"endpoint is {self.endpoint!r}: a socket that is a file is ipc:///PATH, with an"
                " absolute path, for example ipc:///run/quadriga/zmq; ipc alone is a file in the"
                " private directory of the run"
            )

    @property
    def is_open(self) -> bool:
        """Whether a client without a key may reach the socket: another user, or a machine."""
        return self.endpoint.startswith("tcp:") and not self.curve_dir


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
    tool_call_parser = tool_call_parser.removesuffix(EXACT) or tool_call_parser
    if {tool_call_parser, reasoning_parser} <= {AUTO, NONE}:
        return
    from quadriga.server.answer_format import KNOWN_FORMATS

    formats = KNOWN_FORMATS.values()
    _check_parser("tool_call_parser", tool_call_parser, [f.source for f in formats if f.calls])
    _check_parser("reasoning_parser", reasoning_parser, [f.source for f in formats if f.reasoning])


def _check_parser(name: str, value: str, known: list[str]) -> None:
    names = [AUTO, NONE, *sorted(known)]
    if value not in names:
        raise ConfigError(
            f"{name} is {value!r}: it must be one of {', '.join(names)}{nearest(value, names)}"
        )


API_KEY_VARIABLE = "QUADRIGA_API_KEY"


@dataclass(frozen=True, slots=True)
class HttpArgs:
    """Web gateway (http_proc)."""

    no_http: bool = flag(False, "start no web gateway")
    host: str = flag(
        "127.0.0.1", "address of the web gateway; 0.0.0.0 for all networks", unit="HOST", basic=True
    )
    port: int = flag(8000, "port of the web gateway", unit="PORT", basic=True)
    no_ui: bool = flag(False, "serve no page for browsers at /")
    api_key: str = flag(
        "",
        "comma-separated keys that HTTP clients must use one of; the environment variable"
        " QUADRIGA_API_KEY takes the same, and no process list shows it (default: no key is"
        " needed)",
        unit="KEYS",
        basic=True,
        secures=True,
    )
    metrics_without_key: bool = flag(
        False,
        "answer /metrics to clients without a key, for routers that have none; its labels name"
        " tenants and adapters",
    )
    allowed_origins: str = flag(
        "",
        "comma-separated origins of web pages that may call the gateway beside its own, or *"
        " (default: none)",
        unit="ORIGINS",
    )
    allowed_hosts: str = flag(
        "",
        "comma-separated names under which the gateway may be called, such as that of a proxy;"
        " .example.org is all names below it, * any (default: with --api-key or --keys,"
        " or beyond loopback, any name; else localhost)",
        unit="NAMES",
        secures=True,
    )
    max_body_bytes: int = flag(
        16 * 1024 * 1024, "bytes of an HTTP request's body; a larger one is refused", unit="BYTES"
    )
    sse_ping_interval: float = flag(
        15.0,
        "seconds of silence after which a stream gets a comment with its place in the queue or the"
        " share of its prompt that is computed; 0: never",
        unit="SECONDS",
    )
    resume_window: float = flag(
        60.0,
        "seconds for which a resumable stream without a reader goes on and is kept",
        unit="SECONDS",
    )
    data_dir: str = flag(
        "",
        "directory of /v1/files, /v1/batches and stored responses, which only one server may use,"
        " and where they outlive it (default: data in the directory of --journal; without either"
        " they end with the server)",
        unit="DIR",
    )
    no_store: bool = flag(
        False, "keep nothing for clients: no files, batches, stored or background responses"
    )
    max_files_bytes: int = flag(
        10 * 1024 * 1024 * 1024,
        "bytes of all files together, from which uploads are refused",
        unit="BYTES",
    )
    max_stored_bytes: int = flag(
        1024 * 1024 * 1024,
        "bytes of all stored responses and conversations; the least recently used go first",
        unit="BYTES",
    )
    max_stored_age: float = flag(
        30 * 24 * 3600.0,
        "seconds after its last use in which a stored response or conversation expires",
        unit="SECONDS",
    )
    record: str = flag(
        "",
        "append answered prompts for python -m bench.agents, up to 1 GiB",
        unit="FILE",
    )
    batch_concurrency: int = flag(
        16, "lines of batches that run at one time while no other request is open"
    )
    what_if_cost_model: str = flag(
        "",
        "durations of this model's steps for the what-if view of the page, as python -m"
        " bench.simulate.fit_cost_model writes them (default: those of smollm2-135m on a CPU,"
        " stretched)",
        unit="FILE",
    )
    ssl_certfile: str = flag("", "certificate chain (PEM): serve HTTPS", unit="PATH", secures=True)
    ssl_keyfile: str = flag("", "private key (PEM), unless --ssl-certfile holds it", unit="PATH")
    # Bounds that are no flags; tests set smaller ones.
    max_http_connections: int | None = None  # None: one for each request that the server holds
    max_resumable_streams: int = 1024  # running or ended; further ones are refused
    max_file_bytes: int = 200 * 1024 * 1024
    max_stored_responses: int = 100_000  # with conversations; the least recently used go first
    max_background_responses: int = 1000  # that have not ended
    max_open_batches: int = 100  # that have not ended

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "max_body_bytes")
        check_positive(self, "max_files_bytes", "batch_concurrency")
        check_positive(self, "max_stored_bytes", "max_stored_age")
        if self.no_store and self.data_dir:
            raise ConfigError(
                f"--no-store keeps nothing, and --data-dir is {self.data_dir}, where it would be"
                " kept: leave one of them out"
            )
        if not 0 < self.resume_window < math.inf:
            raise ConfigError(
                f"resume_window is {self.resume_window}: it must be a number of seconds above 0"
            )
        if not 0 <= self.sse_ping_interval < math.inf:
            raise ConfigError(
                f"sse_ping_interval is {self.sse_ping_interval}: it must be a number of seconds,"
                " or 0 for never"
            )
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: it must be from 1 to 65535")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        if self.what_if_cost_model and not Path(self.what_if_cost_model).is_file():
            raise ConfigError(
                f"what_if_cost_model is {self.what_if_cost_model!r}: there is no such file; python"
                " -m bench.simulate.fit_cost_model --out FILE writes one"
            )
        self._check_access()

    def _check_access(self) -> None:
        if API_KEY_VARIABLE in os.environ and not _listed(os.environ[API_KEY_VARIABLE]):
            raise ConfigError(
                f"the environment variable {API_KEY_VARIABLE} has no key: an empty value would"
                " leave the server unprotected; give it a key, or unset it"
            )
        if self.api_key and not _listed(self.api_key):
            raise ConfigError(f"api_key is {self.api_key!r}: it has no key")
        for host in self.hosts:
            if not re.fullmatch(r"\*|(\*?\.)?[\w-]+(\.[\w-]+)*", host):
                raise ConfigError(
                    f"allowed_hosts has {host!r}: a name is like chat.example.org, without scheme"
                    " and port"
                )
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/]+", origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}: an origin is like https://example.org, or *"
                )

    @property
    def api_keys(self) -> list[str]:
        """Keys of the flag and of the environment variable."""
        return _listed(self.api_key) + _listed(os.environ.get(API_KEY_VARIABLE, ""))

    @property
    def origins(self) -> list[str]:
        """Origins of --allowed-origins."""
        return _listed(self.allowed_origins)

    @property
    def hosts(self) -> list[str]:
        """Names of --allowed-hosts."""
        return _listed(self.allowed_hosts)

    @property
    def url(self) -> str:
        """URL of the gateway."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{self.port}"


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


TENANTS_BY = ("none", "address")


@dataclass(frozen=True, slots=True)
class TenantArgs:
    """Tenants (tokenizer_proc, scheduler_proc, http_proc)."""

    keys: str = flag(
        "",
        "YAML file of tenants: API keys, weights and limits; quadriga keys add NAME makes entries."
        " It is read again when it changes (default: one tenant, which may use everything)",
        unit="FILE",
        secures=True,
    )
    tenants_by: str = flag(
        "none",
        "address: HTTP requests without a key of --keys are shared fairly between the addresses of"
        " their clients",
        TENANTS_BY,
    )
    usage_log: str = flag(
        "",
        "file to which a line of JSON is appended for each request that ends: tenant, tokens and"
        " seconds (default: none)",
        unit="FILE",
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        if self.keys and self.tenants_by != "none":
            raise ConfigError(
                "--tenants-by says who a request without keys belongs to: it contradicts --keys;"
                " leave one of them out"
            )

    @property
    def has_tenants(self) -> bool:
        """Whether requests belong to tenants."""
        return bool(self.keys) or self.tenants_by != "none"


KEEP_TRACES = ("sampled", "all")


@dataclass(frozen=True, slots=True)
class TraceArgs:
    """Traces (tokenizer_proc, http_proc)."""

    otlp_endpoint: str = flag(
        "",
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as"
        " http://127.0.0.1:4318: sampled traces are exported there; needs the extra otlp (default:"
        " nowhere)",
        unit="URL",
        alias="otlp_traces_endpoint",
    )
    trace_sampling_ratio: float | None = flag(
        None,
        "share of the requests that are traced, from 0 to 1, of those whose traceparent does not"
        " decide it (default: 1 with --otlp-endpoint, else 0)",
        unit="SHARE",
    )
    keep_traces: str = flag(
        "all",
        "requests whose traces the server keeps in memory, up to 48 MB of the last ones, for the"
        " page and for GET /v1/requests. all: all of them, of which only the sampled ones are"
        " exported",
        KEEP_TRACES,
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        ratio = self.trace_sampling_ratio
        if ratio is not None and not 0 <= ratio <= 1:
            raise ConfigError(
                f"trace_sampling_ratio is {ratio}: it must be from 0 to 1, such as 0.01 for one"
                " request in a hundred"
            )
        if self.otlp_endpoint:
            _check_url(self.otlp_endpoint)

    @property
    def sampling_ratio(self) -> float:
        """Share of the requests that are sampled."""
        if self.trace_sampling_ratio is not None:
            return self.trace_sampling_ratio
        return 1.0 if self.otlp_endpoint else 0.0


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_valid = is_valid and parts.port != 0  # reading it checks it
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"otlp_endpoint is {url!r}: it must be a URL such as http://127.0.0.1:4318 (OTLP over"
            " HTTP; gRPC, usually at port 4317, is not supported)"
        )
