"""The tenant of the web request that a task answers."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from quadriga.tenants.tenant import full_name, is_name

USER_HEADER = "X-Quadriga-User"
NUM_HASH_CHARS = 32


@dataclass(slots=True)
class Caller:
    """The tenant of a web request.

    Attributes:
        tenant: its name; "" without tenants.
        has_users: the request may name a user of the tenant.
        user: name of that user; "" for none.
        key_hash: hash of its API key; "" where the key is a tenant's, or none is needed.
    """

    tenant: str = ""
    has_users: bool = False
    user: str = ""
    key_hash: str = ""

    @property
    def owner(self) -> str:
        """Who may read what the request leaves behind: its tenant, else those with its key."""
        return self.tenant or self.key_hash

    @property
    def name(self) -> str:
        """Name of the tenant, with its user."""
        return full_name(self.tenant, self.user)

    def set_user(self, user: Any) -> None:
        """Take the user that the request names first, where the tenant may have users.

        A name that no tenant could have is replaced by its hash.
        """
        if self.has_users and not self.user and isinstance(user, str) and user:
            self.user = user if is_name(user) else short_hash(user)


def short_hash(text: str) -> str:
    """Return a hash of a user's name or an API key."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return digest[:NUM_HASH_CHARS]


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def set_caller(caller: Caller) -> None:
    """Set the tenant of the web request that this task answers from now on."""
    _caller.set(caller)


def current_caller() -> Caller:
    """Return the tenant of the web request that this task, or the task that made it, answers."""
    return _caller.get() or Caller()
