"""The contract of an exporter of traces, and the one that the flags ask for."""

import os
from typing import Protocol

from quadriga.errors import ConfigError
from quadriga.programs import install_command
from quadriga.server.config.frontend_args import TraceArgs

SERVICE_NAME_VARIABLE = "OTEL_SERVICE_NAME"


class Exporter(Protocol):
    """Exports the traces of requests. No method waits for where they are exported to."""

    def put(self, trace: bytes) -> None:
        """Export an encoded RequestTrace, or drop and count it."""

    def info(self) -> dict[str, int]:
        """Return the counters, by their names in the server's info."""

    def close(self) -> None:
        """Export what waits, as far as that takes no more than seconds."""


class NoExporter:
    """Export nothing: there is no --otlp-endpoint."""

    def put(self, trace: bytes) -> None:
        """Ignore the trace."""

    def info(self) -> dict[str, int]:
        """Return no counters."""
        return {}

    def close(self) -> None:
        """Do nothing: no trace waits."""


def make_exporter(args: TraceArgs, model: str) -> Exporter:
    """Return the exporter that the flags ask for.

    Args:
        args: the flags of traces.
        model: name that clients see.

    Raises:
        ConfigError: OpenTelemetry's packages are not installed.
    """
    if not args.otlp_endpoint:
        return NoExporter()
    try:
        from quadriga.server.tracing.otlp import OtlpExporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint is {args.otlp_endpoint}, and its exporter needs the package"
            f" {error.name}, which is not installed: {install_command('otlp')}"
        ) from None
    name = os.environ.get(SERVICE_NAME_VARIABLE, "") or "quadriga"
    resource = {"service.name": name, "gen_ai.response.model": model}
    return OtlpExporter(args.otlp_endpoint, resource)
