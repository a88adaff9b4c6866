"""Receive the multipart body of POST /v1/files."""

import asyncio
from collections.abc import Callable

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from http_proc.apis.files.file_store import FileObject, FileStore, check_purpose
from http_proc.caller import current_caller
from http_proc.protocol.errors import ApiError, invalid

PIECE_BYTES = 1024 * 1024
# An upload may take any time, as long as it goes on.
PIECE_TIMEOUT_S = 60.0
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
MAX_PARTS = 16
FORM = "multipart/form-data"
# What aiohttp's reader raises for bytes that are no form.
BAD_FORM = (ValueError, AssertionError, RuntimeError, LookupError, HttpProcessingError)


async def receive_upload(request: web.Request, store: FileStore) -> FileObject:
    """Store the file of a form, whose parts `purpose` and `file` come in any order.

    Raises:
        ApiError: the form is not as it should be, is late, or is over a limit.
    """
    if request.content_type != FORM:
        raise invalid(f"the body must be {FORM}, with the parts purpose and file", "file")
    store.check_length(request.content_length or 0)
    upload = _Upload(store)
    is_kept = False
    try:
        await _read(request, upload)
        file = upload.file()
        is_kept = True
    finally:
        if not is_kept:
            upload.discard()
    return file


async def _read(request: web.Request, upload: "_Upload") -> None:
    try:
        reader = await request.multipart()
        for _ in range(MAX_PARTS):
            part = await asyncio.wait_for(reader.next(), PIECE_TIMEOUT_S)
            if part is None:
                return
            await upload.take(part)
    except asyncio.TimeoutError:
        raise ApiError(408, f"no byte of the form arrived within {PIECE_TIMEOUT_S:g} s") from None
    except BAD_FORM as error:
        raise invalid(f"the body is no {FORM}: {error}", "file") from None
    raise invalid(f"the form has more than {MAX_PARTS} parts: send purpose and file", "file")


class _Upload:
    """The parts of one form."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._purpose: str | None = None
        self._filename = ""
        self._received: tuple[str, int] | None = None

    async def take(self, part: BodyPartReader | MultipartReader) -> None:
        """Take one part."""
        if isinstance(part, MultipartReader):
            raise invalid("the form holds another form: send purpose and file", "file")
        if part.name == "purpose":
            self._purpose = await _text(part)
            check_purpose(self._purpose)
        elif part.name == "file" and self._received is None:
            # aiohttp decodes bytes that are no UTF-8 to surrogates, which no answer can have.
            name = (part.filename or "file.jsonl").encode("utf-8", "replace").decode()
            self._filename = name[:MAX_NAME_CHARS]
            self._received = await self._store.receive(_pieces(part))
        else:
            name = (part.name or "")[:MAX_NAME_CHARS]
            raise invalid(f"the form has a part {name!r}: send one purpose and one file", name)

    def file(self) -> FileObject:
        """Return the file of a form whose parts were all taken."""
        if self._purpose is None:
            raise invalid("the form has no purpose: it must be 'batch'", "purpose")
        if self._received is None:
            raise invalid("the form has no file", "file")
        file_id, size = self._received
        return self._store.add(
            file_id, size, self._filename, self._purpose, current_caller().file_owner
        )

    def discard(self) -> None:
        """Remove what was received."""
        if self._received is not None:
            self._store.discard(*self._received)


def _pieces(part: BodyPartReader) -> "Callable[[], asyncio.Future[bytes]]":
    def read() -> "asyncio.Future[bytes]":
        return asyncio.ensure_future(
            asyncio.wait_for(part.read_chunk(PIECE_BYTES), PIECE_TIMEOUT_S)
        )

    return read


async def _text(part: BodyPartReader) -> str:
    """Return the text of a short part."""
    data = b""
    while piece := await asyncio.wait_for(part.read_chunk(MAX_FIELD_BYTES), PIECE_TIMEOUT_S):
        data += piece
        if len(data) > MAX_FIELD_BYTES:
            raise invalid(f"{part.name} has more than {MAX_FIELD_BYTES} bytes", part.name)
    return data.decode("utf-8", "replace")
