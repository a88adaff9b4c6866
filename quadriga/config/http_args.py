"""The flags of the web gateway."""

import os
import re
from dataclasses import dataclass

from quadriga.config.flags import flag, positive
from quadriga.errors import ConfigError

API_KEY_VARIABLE = "QUADRIGA_API_KEY"


@dataclass(frozen=True, slots=True)
class HttpArgs:
    """The web gateway (http_proc)."""

    no_http: bool = flag(False, "start no web gateway")
    host: str = flag("127.0.0.1", "address of the web gateway; 0.0.0.0 for all networks")
    port: int = flag(8000, "port of the web gateway")
    api_key: str = flag(
        "",
        "keys that HTTP clients may use, with commas between them; QUADRIGA_API_KEY says the same"
        " without showing them to who lists the processes (default: everybody may)",
    )
    allowed_origins: str = flag(
        "", "web pages that may call the gateway, with commas between them, or * (default: none)"
    )
    max_body_bytes: int = flag(16 * 1024 * 1024, "a larger HTTP request is refused")
    max_http_connections: int = flag(4096, "connections over this are refused")
    log_requests: bool = flag(False, "log a line for each request at its end")
    ssl_certfile: str = flag("", "certificate chain (PEM): serve HTTPS")
    ssl_keyfile: str = flag("", "its private key, where it is not in --ssl-certfile")

    def validate(self) -> None:
        positive("max_body_bytes", self.max_body_bytes)
        positive("max_http_connections", self.max_http_connections)
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}: it must be from 1 to 65535")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/]+", origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}: an origin is like https://example.org, or *"
                )

    @property
    def api_keys(self) -> list[str]:
        """Of the flag and of the environment."""
        return _listed(self.api_key) + _listed(os.environ.get(API_KEY_VARIABLE, ""))

    @property
    def origins(self) -> list[str]:
        return _listed(self.allowed_origins)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{self.port}"


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
