"""The tenant of the web request that a task answers."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from quadriga.server.tenants import Tenant, full_name, is_name, parent_name

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
        entry: the tenant's entry in the key file; None for a request without a key of that file.
    """

    tenant: str = ""
    has_users: bool = False
    user: str = ""
    key_hash: str = ""
    entry: Tenant | None = None

    @classmethod
    def of_key(cls, entry: Tenant) -> "Caller":
        """Return the caller that has the key of a tenant."""
        return cls(entry.name, entry.sub_tenants, entry=entry)

    @classmethod
    def of_name(cls, name: str, has_users: bool) -> "Caller":
        """Return the caller whose `name` is this one, for work that goes on without its request."""
        tenant = parent_name(name)
        return cls(tenant, has_users, name[len(tenant) + 1 :])

    @property
    def file_owner(self) -> str:
        """Name of the tenant to which the caller's files and batches belong; "" for none."""
        return "" if self.entry is None else self.entry.name

    def may_use_files_of(self, owner: str) -> bool:
        """Return whether the caller may use the files and batches of a tenant.

        One without a key of the key file may use all.
        """
        return self.entry is None or self.entry.name == owner

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
