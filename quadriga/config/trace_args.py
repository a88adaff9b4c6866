"""TraceArgs: the flags of traces, which several processes read."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from quadriga.config.flags import flag
from quadriga.errors import ConfigError

KEEP_TRACES = ("sampled", "all")


@dataclass(frozen=True, slots=True)
class TraceArgs:
    """Traces (tokenizer_proc, http_proc)."""

    otlp_endpoint: str = flag(
        "",
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as"
        " http://127.0.0.1:4318: sampled traces are exported there (default: nowhere)",
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
        "sampled",
        "traces that GET /v1/requests/ID/trace shows. all: those of all requests, of which only"
        " the sampled ones are exported",
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
