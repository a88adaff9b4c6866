"""The tenant of each request, and what the frontend does with it before it submits the request."""

import hashlib
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from quadriga.config.tenant_args import TenantArgs
from quadriga.errors import InvalidRequest
from quadriga.tenants.key_file import TenantFile
from quadriga.tenants.own_info import own_info
from quadriga.tenants.tenant import MIN_PRIORITY, Tenant
from quadriga.wire.client_address import is_gateway
from quadriga.wire.messages.from_client import Generate
from quadriga.wire.messages.to_client import Info
from quadriga.wire.sockets import encode

NUM_SHOWN_CHARS = 12

_decode_info = msgspec.msgpack.Decoder(Info).decode


class Owner(NamedTuple):
    """The tenant of a request.

    Attributes:
        name: the tenant's name, with its user where there is one; "" without tenants.
        tenant: its weight and limits; None where it has none of its own.
    """

    name: str = ""
    tenant: Tenant | None = None

    @property
    def weight(self) -> float:
        """Its share of the server."""
        return 1.0 if self.tenant is None else self.tenant.weight

    @property
    def cache_salt(self) -> str:
        """What its cached prefixes are kept apart by; "" where it shares them."""
        is_apart = self.tenant is not None and self.tenant.cache == "own"
        return self.tenant.name if self.tenant is not None and is_apart else ""


class RequestOwners:
    """Find the tenants of requests.

    A gateway has checked the API key of a request and names its tenant. A client with a CURVE key
    is the tenant whose entry names that key. Any other client is a tenant of its own.

    Args:
        args: the flags of tenants.
        model: name of the model that is served.
        key_names: names of the CURVE keys of clients by their addresses, "" for the server's own;
            None where the socket has no keys.
        directory: as of TenantFile.
    """

    def __init__(
        self,
        args: TenantArgs,
        model: str = "",
        key_names: MutableMapping[bytes, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._file = TenantFile(Path(args.keys), directory=directory) if args.keys else None
        self._has_tenants = args.has_tenants
        self._model = model
        self._key_names = key_names

    def forget(self, client: bytes) -> None:
        """Forget a client that is gone."""
        if self._key_names is not None:
            self._key_names.pop(client, None)

    def check_operator(self, client: bytes, what: str) -> None:
        """Raise InvalidRequest where a client may not do what concerns all tenants.

        Args:
            client: Its ZMQ identity.
            what: The beginning of the reason, to which "all of them" is added.
        """
        if self._file is not None and not self._is_gateway(client):
            raise InvalidRequest(
                f"this server has tenants, and {what} all of them: ask the web gateway, with a key"
                " of --api-key"
            )

    def visible(self, client: bytes, payload: bytes) -> bytes:
        """Return the answer to a question as its client may see it.

        With a key file the server's info shows a client of its own only what is its tenant's.
        """
        if self._file is None or self._is_gateway(client):
            return payload
        try:
            info = _decode_info(payload)
        except msgspec.ValidationError:  # an answer to another question
            return payload
        return encode(Info(info.request_id, own_info(info.values, self.owner(client, "").name)))

    def owner(self, client: bytes, named: str) -> Owner:
        """Return the tenant of a request. `named`: Generate.tenant.

        Raises:
            InvalidRequest: the gateway names a tenant that the file has no more.
        """
        if not self._has_tenants:
            return Owner()
        if self._file is not None and self._file.has_changed():
            self._file.reload_in_thread()
        if self._is_gateway(client):
            return self._named(named)
        key_name = None if self._key_names is None else self._key_names.get(client)
        if self._file is not None and key_name:
            tenant = self._file.index.by_curve.get(key_name)
            if tenant is not None:
                return Owner(tenant.name, tenant)
        # The address itself is a secret of its client.
        return Owner("client-" + hashlib.sha256(client).hexdigest()[:NUM_SHOWN_CHARS])

    def _is_gateway(self, client: bytes) -> bool:
        has_key = self._key_names is None or self._key_names.get(client) == ""
        return is_gateway(client) and has_key

    def _named(self, name: str) -> Owner:
        if self._file is None or not name:
            return Owner(name)
        tenant = self._file.index.named(name)
        if tenant is None:  # the gateway may have read a new file before this process
            self._file.reload(settles=False)
            tenant = self._file.index.named(name)
        if tenant is None:
            raise InvalidRequest(f"there is no tenant {name!r} any more: use another API key")
        return Owner(name, tenant)

    def checked(self, message: Generate, owner: Owner) -> Generate:
        """Return a request with a priority that its tenant may use.

        The default priority, 0, becomes the nearest one that is allowed. The lowest one, which
        lines of batches have, is allowed to all.

        Raises:
            InvalidRequest: the tenant may not use this priority, or not the model.
        """
        tenant = owner.tenant
        if tenant is None:
            return message
        if tenant.models and self._model not in tenant.models:
            raise InvalidRequest(
                f"model is {self._model!r}, and tenant {tenant.name} may use"
                f" {', '.join(tenant.models)}: ask the server's operator",
                "model",
            )
        if message.priority == MIN_PRIORITY:
            return message
        smallest, largest = tenant.priority
        if message.priority and not smallest <= message.priority <= largest:
            raise InvalidRequest(
                f"priority is {message.priority}: tenant {tenant.name} may use {smallest} to"
                f" {largest}",
                "priority",
            )
        priority = min(max(message.priority, smallest), largest)
        if priority == message.priority:
            return message
        return msgspec.structs.replace(message, priority=priority)
