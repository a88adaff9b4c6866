"""Tenant: an owner of requests, with its weight and its limits."""

import re
from dataclasses import dataclass

MAX_NAME_CHARS = 64
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
NAME_FORM = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}"
SEPARATOR = "/"
CACHE_KINDS = ("shared", "own")

_NAME = re.compile(NAME_FORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """An owner of requests. Limits of None do not limit.

    Attributes:
        name: 1 to 64 letters, digits and `._:@-`.
        key: `sha256:` and the hash of its API key in hex; "" without one.
        curve: name of its key in --curve-dir; "" without one.
        weight: its share of the server, in proportion to the weights of the others.
        priority: smallest and largest priority of its requests.
        max_open_requests: requests that have not ended.
        requests_per_minute: requests in any 60 seconds.
        tokens_per_minute: prompt and generated tokens in any 60 seconds.
        models: names of the models that it may use; empty for all.
        sub_tenants: its requests may name a user, who then shares fairly with its other users.
        max_files_bytes: bytes of its files; output of its batches counts.
        cache: "own" keeps its cached prefixes apart from those of other tenants.
    """

    name: str
    key: str = ""
    curve: str = ""
    weight: float = 1.0
    priority: tuple[int, int] = (MIN_PRIORITY, MAX_PRIORITY)
    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] = ()
    sub_tenants: bool = False
    max_files_bytes: int | None = None
    cache: str = "shared"


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a tenant, or of a user of one."""
    return _NAME.fullmatch(text) is not None


def full_name(tenant: str, user: str) -> str:
    """Return the name of a user of a tenant, or the tenant's own without a user."""
    return f"{tenant}{SEPARATOR}{user}" if user else tenant


def parent_name(name: str) -> str:
    """Return the tenant of a name that may have a user."""
    return name.partition(SEPARATOR)[0]
