"""The store of an application: it is opened at the start, and closed at the end."""

from collections.abc import AsyncIterator

from aiohttp import web

from http_proc.apis.responses.store import RESPONSE_STORE
from http_proc.apis.responses.stored.bounds import StoreBounds
from http_proc.apis.responses.stored.response_store import StoredResponses
from http_proc.gateway import GATEWAY

FILE_NAME = "responses.sqlite3"


async def store_lifetime(app: web.Application) -> AsyncIterator[None]:
    """Keep responses while the application runs, if it has a directory for them."""
    gateway = app[GATEWAY]
    args, directory = gateway.args, gateway.data_dir
    bounds = StoreBounds(
        args.max_stored_responses, args.max_stored_bytes, args.max_stored_age, gateway.shares
    )
    if directory is None or not args.max_stored_responses:
        yield
        return
    store = StoredResponses(
        directory / FILE_NAME,
        bounds,
        gateway.outlives_server,
        args.max_body_bytes,
        gateway.stored_items,
    )
    app[RESPONSE_STORE] = store
    await store.open()
    yield
    await store.close()
