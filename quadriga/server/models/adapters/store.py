"""The adapters of a model by their names, and copies of their files, in the directory of a run.

The copies are named by the hash of their content: a request that has begun with one version of an
adapter goes on with it, also after a crash, whatever becomes of the files that it was loaded from.
The frontend and the gateway share the list; each reads it again whenever it has changed.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from quadriga import clock, disk
from quadriga.errors import ConfigError, InvalidRequest, ModelError
from quadriga.keywords import similar
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.adapters.content import (
    PICKLE_NAME,
    SAFETENSORS_NAME,
    adapter_id,
    check_adapter,
)
from quadriga.server.models.adapters.peft_config import CONFIG_NAME
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import InfoValues

LIST_NAME = "adapters.json"
MAX_NAME_CHARS = 200
# Copies without a name, and without a request, are removed when they are older.
UNUSED_S = 30.0
_NO_DIRECTORY = re.compile(r"[^\w.-]+", re.ASCII)

T = TypeVar("T")


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests can name.

    Attributes:
        id: hash of its content.
        path: where it was loaded from.
        loaded_at: Unix seconds.
        rank: the largest of its ranks.
        is_found: it was found in --lora-dir when a request has named it.
    """

    name: str
    id: str
    path: str
    loaded_at: float
    rank: int = 0
    is_found: bool = False

    @property
    def ref(self) -> AdapterRef:
        """The adapter as a request has it."""
        return AdapterRef(self.id, self.name, self.path)


def store_directory(server_dir: Path, model: str) -> Path:
    """Return the directory of a model's adapters.

    Args:
        server_dir: directory of the server's run.
        model: name of the model, where the server has several; "": it is the only one.
    """
    return server_dir / "adapters" / (_NO_DIRECTORY.sub("-", model) or "_")


class AdapterStore:
    """The adapters of a model.

    Args:
        directory: as store_directory says.
        args: the flags of the model.
    """

    def __init__(self, directory: Path, args: ModelArgs) -> None:
        self._directory = directory
        self._args = args
        self._lora_dir = Path(args.lora_dir).expanduser().absolute() if args.lora_dir else None
        self._list = directory / LIST_NAME
        self._stamp: disk.FileStamp | None = None
        self._entries: dict[str, AdapterEntry] = {}

    # --- names ------------------------------------------------------------------------------------

    @property
    def entries(self) -> dict[str, AdapterEntry]:
        """The loaded adapters by name."""
        with suppress(FileNotFoundError):
            if (stamp := disk.file_stamp(self._list)) != self._stamp:
                self._entries = _read_list(self._list)
                self._stamp = stamp
        return self._entries

    def has(self, name: str) -> bool:
        """Return whether requests can name the adapter: it is loaded, or is in --lora-dir."""
        return self._args.serves_adapters and (name in self.entries or self.is_found(name))

    def is_found(self, name: str) -> bool:
        """Return whether --lora-dir has an adapter of this name."""
        path = self._found(name)
        return path is not None and any(file.is_file() for file in _files_of(path))

    @property
    def names(self) -> list[str]:
        """The names of all adapters, those that are loaded first."""
        found: list[str] = []
        if self._lora_dir is not None:
            with suppress(OSError):
                found = sorted(path.name for path in self._lora_dir.iterdir())
        loaded = self.entries
        return [*loaded, *(name for name in found if name not in loaded and self.is_found(name))]

    def origin(self, name: str, started_at: int) -> tuple[int, str]:
        """Return when an adapter was loaded, in Unix seconds, and its path.

        Args:
            name: of an adapter that requests can name.
            started_at: the time of one that is not loaded.
        """
        if (entry := self.entries.get(name)) is not None:
            return int(entry.loaded_at), entry.path
        return started_at, str(self._found(name))

    def require(self, name: str) -> AdapterEntry:
        """Return a loaded adapter.

        Raises:
            InvalidRequest: no adapter has the name.
        """
        if (entry := self.entries.get(name)) is None:
            shown = name[:MAX_NAME_CHARS]
            raise InvalidRequest(f"there is no adapter {shown!r}: {self.advice(name)}", "adapter")
        return entry

    def advice(self, name: str) -> str:
        """Return which names there are, those like `name` first."""
        if not self._args.serves_adapters:
            return "start the server with --lora-modules NAME=PATH, --lora-dir or --enable-lora"
        names = self.names
        near = similar(name[:MAX_NAME_CHARS], names) or names[:5]
        return f"use {' or '.join(map(repr, near))}" if near else "none is loaded"

    def info(self) -> InfoValues:
        """Return what the server info says of the adapters, as docs/protocol.md lists it."""
        return {
            "adapter_names": self.names,
            "adapter_ids": {name: entry.id for name, entry in self.entries.items()},
            "adapter_directory": str(self._directory),
            "max_lora_rank": self._args.max_lora_rank,
        }

    # --- load and unload --------------------------------------------------------------------------

    def load_modules(self) -> None:
        """Load the adapters of --lora-modules, unless an earlier frontend has done so.

        Raises:
            ConfigError: an adapter cannot be loaded.
        """
        if self._list.exists():
            return  # what was unloaded since stays so
        entries = []
        for name, path in self._args.adapter_paths.items():
            try:
                entries.append(self._entry(name, path))
            except InvalidRequest as error:
                raise ConfigError(f"--lora-modules {name}={path}: {error}") from None
        self._change(lambda known: known.update({entry.name: entry for entry in entries}))

    def load_found(self, name: str) -> AdapterEntry:
        """Load an adapter of --lora-dir, unless it is loaded. Raise InvalidRequest."""
        if (entry := self.entries.get(name)) is not None:
            return entry
        directory = self._found(name)
        if directory is None:
            return self.require(name)
        return self.load(name, str(directory), is_found=True)

    def load(
        self, name: str, path: str, replace: bool = False, is_found: bool = False
    ) -> AdapterEntry:
        """Copy an adapter's files, and let requests name it.

        It takes as long as reading the files does.

        Args:
            name: not that of a model.
            path: of a PEFT directory or a GGUF file.
            replace: an adapter of this name is replaced: requests that have begun keep theirs.
            is_found: it is one of --lora-dir.

        Raises:
            InvalidRequest: the name is taken, or the files are no adapter of the model.
        """
        known = self.entries.get(name)
        if known is not None and not replace:
            if is_found or known.id == _identity(path):
                return known
            raise InvalidRequest(
                f"adapter {name!r} is loaded from {known.path}: unload it first, or send"
                " load_inplace true",
                "lora_name",
            )
        entry = self._entry(name, path, is_found)
        self._change(lambda entries: entries.__setitem__(name, entry))
        return entry

    def _entry(self, name: str, path: str, is_found: bool = False) -> AdapterEntry:
        """Copy an adapter's files, and return what the list has of it. Raise InvalidRequest."""
        _check_name(name)
        source = _absolute(path)
        try:
            rank = check_adapter(source, self._args.max_lora_rank).rank
            copy = self._copy(source)
        except ModelError as error:
            raise InvalidRequest(str(error), "lora_path") from None
        return AdapterEntry(
            name=name, id=copy.name, path=str(source), loaded_at=clock.now(), rank=rank,
            is_found=is_found,
        )  # fmt: skip

    def unload(self, name: str) -> AdapterEntry:
        """Take a name back. Requests that have begun go on. Raise InvalidRequest."""
        entry = self.require(name)
        self._change(lambda entries: entries.pop(name, None))
        return entry

    def put_back(self, name: str, entry: AdapterEntry | None) -> None:
        """Let a name be that of an earlier adapter again; None: of none."""

        def change(entries: dict[str, AdapterEntry]) -> None:
            if entry is None:
                entries.pop(name, None)
            else:
                entries[name] = entry

        self._change(change)

    def sweep(self, used: Collection[str], num_kept: int) -> list[str]:
        """Remove the copies that nothing needs, and return their ids.

        Args:
            used: ids of the adapters of open requests.
            num_kept: adapters of --lora-dir that stay loaded, those that were loaded last.
        """
        found = [entry for entry in self.entries.values() if entry.is_found]
        found = [entry for entry in found if entry.id not in used]
        surplus = sorted(found, key=lambda entry: entry.loaded_at)[: max(0, len(found) - num_kept)]
        if surplus:
            names = {entry.name for entry in surplus}
            self._change(lambda entries: [entries.pop(name, None) for name in names])
        named = {entry.id for entry in self.entries.values()}
        removed = []
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            if path.name in named or path.name in used or not path.is_dir():
                continue
            with suppress(OSError):
                if clock.now() - path.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(path)
                    removed.append(path.name)
        return removed

    def files(self, adapter: AdapterRef) -> Path:
        """Return where the files of an adapter are: the copy, else those that it was made of.

        The latter may have another content by now, or be missing.
        """
        copy = self._directory / adapter.id
        return _content(copy) if copy.is_dir() else Path(adapter.path)

    # --- files ------------------------------------------------------------------------------------

    def _found(self, name: str) -> Path | None:
        """Return the path in --lora-dir that a name says."""
        is_plain = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
        is_plain = is_plain and "/" not in name and not name.startswith(".")
        return self._lora_dir / name if self._lora_dir is not None and is_plain else None

    def _copy(self, source: Path) -> Path:
        """Return the copy of an adapter's files, whose name is its id."""
        try:
            disk.make_directory(self._directory)
            scratch = Path(tempfile.mkdtemp(prefix=".", dir=self._directory))
            try:
                for path in _files_of(source):
                    if path.is_file():
                        shutil.copyfile(path, scratch / path.name)
                copy = self._directory / adapter_id(_content(scratch))
                with suppress(OSError):  # another load has made it
                    os.rename(scratch, copy)
                os.utime(copy)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        except OSError as error:
            raise InvalidRequest(
                f"the files of {source} cannot be copied to {self._directory}: {error.strerror}",
                "lora_path",
            ) from None
        return copy

    def _change(self, change: Callable[[dict[str, AdapterEntry]], object]) -> None:
        """Change the list, which other processes change, too."""
        disk.make_directory(self._directory)
        with _locked(self._directory):
            entries = dict(_read_list(self._list))
            change(entries)
            disk.replace(self._list, msgspec.json.encode(list(entries.values())))


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _identity(path: str) -> str:
    """Return the id of the adapter at a path. Raise InvalidRequest."""
    try:
        return adapter_id(_absolute(path))
    except ModelError as error:
        raise InvalidRequest(str(error), "lora_path") from None


def _files_of(path: Path) -> list[Path]:
    """Return the files that an adapter may have."""
    if not path.is_dir():
        return [path] if path.suffix == ".gguf" else []
    return [path / name for name in (CONFIG_NAME, SAFETENSORS_NAME, PICKLE_NAME)]


def _content(directory: Path) -> Path:
    """Return what a directory of copied files stands for: itself, or its only .gguf."""
    return next(directory.glob("*.gguf"), directory)


def _check_name(name: str) -> None:
    if not name.isprintable() or name.split() != [name] or len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(
            f"the adapter's name is {name[:MAX_NAME_CHARS]!r}: it must have 1 to {MAX_NAME_CHARS}"
            " characters without blanks",
            "lora_name",
        )


def _read_list(path: Path) -> dict[str, AdapterEntry]:
    """Return the entries of a list; none if there is none. Raise ConfigError."""
    try:
        entries = msgspec.json.decode(disk.read_bytes(path), type=list[AdapterEntry])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no list of adapters: {error}") from None
    return {entry.name: entry for entry in entries}


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a directory's list in a `with` block."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
