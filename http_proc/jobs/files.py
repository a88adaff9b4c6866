"""FileStore: contents and descriptions of files in one directory, and how uploads are received."""

import asyncio
import errno
import logging
import os
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from http_proc.core.caller import current_caller
from http_proc.core.errors import ApiError, invalid
from http_proc.core.shares import Shares
from quadriga import disk
from quadriga.clock import now

_ID = re.compile(r"file-[0-9a-f]{32}", re.ASCII)

ReadPiece = Callable[[], Awaitable[bytes]]


class FileObject(msgspec.Struct, kw_only=True):
    """A stored file.

    bytes: its size; created_at: in Unix seconds; tenant: whose it is, if it is a tenant's.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    tenant: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def owner(self) -> str:
        """Name of the tenant; "" for none."""
        return self.tenant or ""


def new_file_id() -> str:
    """Return an unused id."""
    return f"file-{uuid.uuid4().hex}"


class FileStore:
    """The files of one directory, which only one process may use.

    `ID.content` holds the bytes, `ID.json` the description. A file exists when its description
    does, which is written last and removed first; contents without one are removed at the start.

    Args:
        max_file_bytes: size of the largest file that may be uploaded.
        max_total_bytes: size of all files from which uploads are refused.
        shares: how that is divided among tenants.

    Attributes:
        num_bytes_of: size of each tenant's files, with those that are being received; those of no
            tenant have the name "".
    """

    def __init__(
        self, directory: Path, max_file_bytes: int, max_total_bytes: int, shares: Shares
    ) -> None:
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._max_total_bytes = max_total_bytes
        self._shares = shares
        self._files: dict[str, FileObject] = {}
        self.num_bytes_of: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Size of all files, with those that are being received."""
        return self.num_bytes_of.total()

    def open(self, kept: Collection[str] = ()) -> None:
        """Read the descriptions, and remove contents that have none.

        Args:
            kept: ids of contents whose description comes later: the output of open batches.
        """
        disk.make_directory(self._directory)
        for path in self._directory.glob("file-*.json"):
            with suppress(msgspec.DecodeError):
                file = msgspec.json.decode(disk.read_bytes(path), type=FileObject)
                self._files[file.id] = file
        for path in self._directory.iterdir():
            name, _, ending = path.name.partition(".")
            is_known = name in self._files or name in kept
            if ending != "json" and not (ending == "content" and is_known):
                logging.info("%s is an upload that did not end: it is removed", path)
                path.unlink()
        self.num_bytes_of = Counter()
        for file in self._files.values():
            self.num_bytes_of[file.owner] += file.bytes

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._directory / f"{file_id}.content"

    def get(self, file_id: str) -> FileObject:
        """Return a file. Raise a 404 for an unknown id, a 403 for a file of another tenant."""
        file = self._files.get(file_id)
        if file is None:
            reason = "" if _ID.fullmatch(file_id) else ": an id is file- and 32 hexadecimal digits"
            raise ApiError(404, f"there is no file {file_id!r}{reason}", param="id",
                           code="file_not_found")  # fmt: skip
        check_owner(file.owner, f"file {file_id}")
        return file

    def newest_first(self) -> list[FileObject]:
        """Return the files that the caller may use, the newest first."""
        files = [
            file for file in self._files.values() if current_caller().may_use_files_of(file.owner)
        ]
        return sorted(files, key=lambda f: (f.created_at, f.id), reverse=True)

    def delete(self, file_id: str) -> None:
        """Remove a file. Raise ApiError as `get`."""
        file = self.get(file_id)
        (self._directory / f"{file_id}.json").unlink(missing_ok=True)
        disk.sync_directory(self._directory)
        self.path(file_id).unlink(missing_ok=True)
        del self._files[file_id]
        self.num_bytes_of[file.owner] -= file.bytes

    async def receive(self, read: ReadPiece) -> tuple[str, int]:
        """Write an upload to the disk, durably, and return its id and its size.

        It becomes a file by `add`; `discard` removes it.

        Args:
            read: returns the next bytes, and none at the end.

        Raises:
            ApiError: the upload is over a limit.
            OSError: the disk refuses it.
        """
        file_id, size = new_file_id(), 0
        fd = await asyncio.to_thread(disk.create, self.path(file_id))
        try:
            while piece := await read():
                self._check_limits(size + len(piece), len(piece))
                size += len(piece)
                self.num_bytes_of[current_caller().file_owner] += len(piece)
                await asyncio.to_thread(disk.write_all, fd, piece)
            await asyncio.to_thread(os.fsync, fd)
        except BaseException:
            self.discard(file_id, size)
            raise
        finally:
            os.close(fd)
        return file_id, size

    def discard(self, file_id: str, size: int) -> None:
        """Remove an upload that does not become a file."""
        self.num_bytes_of[current_caller().file_owner] -= size
        self.path(file_id).unlink(missing_ok=True)

    def add(self, file_id: str, size: int, filename: str, purpose: str, owner: str) -> FileObject:
        """Make a file of a received upload, durably."""
        file = FileObject(
            id=file_id,
            bytes=size,
            created_at=int(now()),
            filename=filename,
            purpose=purpose,
            tenant=owner or msgspec.UNSET,
        )
        disk.replace(self._directory / f"{file_id}.json", msgspec.json.encode(file))
        self._files[file_id] = file
        return file

    def adopt(self, file_id: str, filename: str, purpose: str, owner: str) -> FileObject:
        """Make a file of a content that a batch has written, or return the file that it is."""
        if file_id in self._files:
            return self._files[file_id]
        size = self.path(file_id).stat().st_size
        file = self.add(file_id, size, filename, purpose, owner)
        self.num_bytes_of[owner] += size
        return file

    def check_length(self, num_bytes: int) -> None:
        """Raise a 413 for an upload that announces too many bytes."""
        # A multipart body is a little larger than its file.
        if num_bytes > self._max_file_bytes + 64 * 1024:
            raise self._too_large()

    def _check_limits(self, size: int, added: int) -> None:
        """Raise ApiError for an upload that has a size with the bytes that are to be added."""
        if size > self._max_file_bytes:
            raise self._too_large()
        limit, owner = self._max_total_bytes, current_caller().file_owner
        if self.num_bytes + added > limit:
            raise _no_space(
                f"all files together would have more than {limit} bytes (--max-files-bytes)"
            )
        if not self._shares.has_room(owner, self.num_bytes_of, limit, added):
            raise _no_space(
                f"the files of tenant {owner} would have more than"
                f" {self.num_bytes_of[owner]} bytes, and what is left of {limit} bytes"
                " (--max-files-bytes) is the share of other tenants"
            )
        entry = current_caller().entry
        own_limit = None if entry is None else entry.max_files_bytes
        if own_limit is not None and self.num_bytes_of[owner] + added > own_limit:
            raise _no_space(
                f"the files of tenant {owner} would have more than {own_limit} bytes"
                " (max_files_bytes in the key file)"
            )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the file is over {self._max_file_bytes} bytes: split it",
            param="file",
            code="file_too_large",
        )


def check_owner(owner: str, what: str) -> None:
    """Raise a 403 where the caller may not use what belongs to a tenant."""
    if not current_caller().may_use_files_of(owner):
        raise ApiError(
            403,
            f"{what} is not of tenant {current_caller().tenant}: use the key that made it",
            code="not_yours",
        )


@contextmanager
def disk_errors() -> Iterator[None]:
    """Convert an OSError of a `with` block to an ApiError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space("the disk is full") from None
        logging.error("a file cannot be kept: %s", error)
        raise ApiError(
            500, "the disk refuses the file; the server's log says why",
            code="disk_error",
        ) from None  # fmt: skip


def _no_space(reason: str) -> ApiError:
    return ApiError(507, f"{reason}: delete files that are not needed", code="no_space")


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
    try:
        await _read(request, upload)
        return upload.file()
    except BaseException:
        upload.discard()
        raise


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
            if self._purpose != "batch":
                raise invalid(
                    f"purpose is {self._purpose[:100]!r}: only 'batch' is supported", "purpose"
                )
        elif part.name == "file" and self._received is None:
            # aiohttp decodes bytes that are no UTF-8 to surrogates, which no answer can have.
            name = (part.filename or "file.jsonl").encode("utf-8", "replace").decode()
            self._filename = name[:MAX_NAME_CHARS]
            self._received = await self._store.receive(lambda: _piece(part, PIECE_BYTES))
        else:
            name = (part.name or "")[:MAX_NAME_CHARS]
            raise invalid(f"the form has a part {name!r}: send one purpose and one file", name)

    def file(self) -> FileObject:
        """Return the file of a form whose parts were all taken."""
        if self._purpose is None:
            raise invalid("the form has no purpose: it must be 'batch'", "purpose")
        if self._received is None:
            raise invalid("the form has no file", "file")
        owner = current_caller().file_owner
        return self._store.add(*self._received, self._filename, self._purpose, owner)

    def discard(self) -> None:
        """Remove what was received."""
        if self._received is not None:
            self._store.discard(*self._received)


async def _piece(part: BodyPartReader, num_bytes: int) -> bytes:
    """Return the next bytes of a part, none at its end."""
    return bytes(await asyncio.wait_for(part.read_chunk(num_bytes), PIECE_TIMEOUT_S))


async def _text(part: BodyPartReader) -> str:
    """Return the text of a short part."""
    data = b""
    while piece := await _piece(part, MAX_FIELD_BYTES):
        data += piece
        if len(data) > MAX_FIELD_BYTES:
            raise invalid(f"{part.name} has more than {MAX_FIELD_BYTES} bytes", part.name)
    return data.decode("utf-8", "replace")
