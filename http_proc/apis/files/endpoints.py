"""The handlers and the table of /v1/files."""

import asyncio
import os

import msgspec
from aiohttp import web

from http_proc.apis.batch.service import service_of
from http_proc.apis.files.file_store import FileObject, disk_errors
from http_proc.apis.files.pages import page
from http_proc.apis.files.upload import FORM, receive_upload
from http_proc.endpoints.endpoint import Endpoint, post
from http_proc.responses import json_response

BINARY = "application/octet-stream"
PIECE_BYTES = 256 * 1024


class FileUpload(msgspec.Struct):
    """The form of POST /v1/files. file: JSON lines; purpose: batch."""

    file: str
    purpose: str


class FileList(msgspec.Struct):
    """A page of files, the newest first."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedFile(msgspec.Struct):
    """The file that was removed."""

    id: str
    deleted: bool = True
    object: str = "file"


async def create_file(request: web.Request) -> web.Response:
    """Store a file; it is on the disk when the answer is sent."""
    service = await service_of(request)
    with disk_errors():
        return json_response(await receive_upload(request, service.files))


async def list_files(request: web.Request) -> web.Response:
    """List the files."""
    service = await service_of(request)
    files, purpose = service.files.newest_first(), request.query.get("purpose")
    files = [file for file in files if purpose in (None, file.purpose)]
    found, has_more = page(request, files, 10_000, 10_000)
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return json_response(FileList(found, has_more, first, last))


async def get_file(request: web.Request) -> web.Response:
    """Return the description of a file."""
    service = await service_of(request)
    return json_response(service.files.get(request.match_info["id"]))


async def file_content(request: web.Request) -> web.StreamResponse:
    """Send the content of a file, piece by piece."""
    service = await service_of(request)
    path = service.files.path(service.files.get(request.match_info["id"]).id)
    with disk_errors():
        content = await asyncio.to_thread(path.open, "rb")
    with content:
        response = web.StreamResponse(headers={"Content-Type": BINARY})
        response.content_length = os.fstat(content.fileno()).st_size
        await response.prepare(request)
        while piece := await asyncio.to_thread(content.read, PIECE_BYTES):
            await response.write(piece)
    await response.write_eof()
    return response


async def delete_file(request: web.Request) -> web.Response:
    """Remove a file."""
    service = await service_of(request)
    file = service.files.get(request.match_info["id"])
    service.check_unused(file.id)
    with disk_errors():
        service.files.delete(file.id)
    return json_response(DeletedFile(file.id))


FILE_ENDPOINTS = [
    post("/v1/files", create_file, "Store a file", FileUpload, FileObject, body_type=FORM),
    Endpoint("/v1/files", list_files, "The files", FileList),
    Endpoint("/v1/files/{id}", get_file, "One file", FileObject),
    Endpoint("/v1/files/{id}", delete_file, "Remove a file", DeletedFile, method="delete"),
    Endpoint("/v1/files/{id}/content", file_content, "The content of a file", BINARY),
]
