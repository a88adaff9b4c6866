"""TenantArgs: the flags of tenants, which several processes read."""

from dataclasses import dataclass

from quadriga.config.flags import flag
from quadriga.errors import ConfigError

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
