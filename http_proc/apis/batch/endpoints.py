"""The handlers and the table of /v1/batches."""

from aiohttp import web

from http_proc.apis.batch.batch_types import BatchList, BatchObject, CreateBatchRequest
from http_proc.apis.batch.line_server import ENDPOINTS
from http_proc.apis.batch.service import service_of
from http_proc.apis.files.file_store import disk_errors
from http_proc.apis.files.pages import page
from http_proc.endpoints.endpoint import Endpoint, post
from http_proc.endpoints.request_body import convert, read_object
from http_proc.protocol.errors import ApiError, invalid
from http_proc.protocol.metadata import check_metadata
from http_proc.responses import json_response


async def create_batch(request: web.Request) -> web.Response:
    """Start a batch: its file is checked and run afterwards."""
    service = await service_of(request)
    call = convert(await read_object(request), CreateBatchRequest)
    if call.endpoint not in ENDPOINTS:
        names = ", ".join(ENDPOINTS)
        raise invalid(f"endpoint is {call.endpoint[:100]!r}: it must be one of {names}", "endpoint")
    check_metadata(call.metadata or {})
    try:
        purpose = service.files.get(call.input_file_id).purpose
    except ApiError as error:
        error.answer.error.param = "input_file_id"
        raise
    if purpose != "batch":
        raise invalid(
            f"file {call.input_file_id} has the purpose {purpose!r}: upload it with 'batch'",
            "input_file_id",
        )
    with disk_errors():
        return json_response(service.create(call))


async def list_batches(request: web.Request) -> web.Response:
    """List the batches."""
    service = await service_of(request)
    found, has_more = page(request, service.newest_first(), 20, 100)
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return json_response(BatchList(found, has_more, first, last))


async def get_batch(request: web.Request) -> web.Response:
    """Return a batch."""
    service = await service_of(request)
    return json_response(service.get(request.match_info["id"]))


async def cancel_batch(request: web.Request) -> web.Response:
    """End a batch; the lines that are answered stay in its output file."""
    service = await service_of(request)
    with disk_errors():
        return json_response(service.cancel(request.match_info["id"]))


BATCH_ENDPOINTS = [
    post("/v1/batches", create_batch, "Start a batch", CreateBatchRequest, BatchObject),
    Endpoint("/v1/batches", list_batches, "The batches", BatchList),
    Endpoint("/v1/batches/{id}", get_batch, "One batch", BatchObject),
    post("/v1/batches/{id}/cancel", cancel_batch, "End a batch", None, BatchObject),
]
