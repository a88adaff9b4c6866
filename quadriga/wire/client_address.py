"""Addresses of clients at the public socket: the gateway's, and how the log shows the others."""

import secrets
import uuid

NUM_ADDRESS_BYTES = 16
GATEWAY_PREFIX = b"http_proc"
NUM_SHOWN_BYTES = 4


def gateway_address() -> uuid.UUID:
    """Return a new address for a gateway. Other clients have random ones."""
    random_bytes = secrets.token_bytes(NUM_ADDRESS_BYTES - len(GATEWAY_PREFIX))
    return uuid.UUID(bytes=GATEWAY_PREFIX + random_bytes)


def is_gateway(client: bytes) -> bool:
    """Return whether an address is a gateway's, which logs its requests itself."""
    return client.startswith(GATEWAY_PREFIX)


def short_address(client: bytes) -> str:
    """Return the begin of an address, as the log shows it."""
    return client[:NUM_SHOWN_BYTES].hex()
