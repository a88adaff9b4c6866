"""The adapters of a model by their names, and copies of their files.

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

import msgspec

from quadriga import clock, disk
from quadriga.errors import ConfigError, InvalidRequest, ModelError
from quadriga.keywords import similar
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
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
COPIES_NAME = "adapters"  # directory of the copies in that of the journal
MAX_NAME_CHARS = 200
# Copies without a name, and without a request, are removed when they are older.
UNUSED_S = 30.0
_NO_DIRECTORY = re.compile(r"[^\w.-]+", re.ASCII)


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests can name.

    Attributes:
        id: hash of its content; "": it is in --lora-dir, and no request has named it yet.
        path: where it was loaded from.
        loaded_at: Unix seconds.
        rank: the largest of its ranks.
        is_found: it was found in --lora-dir when a request has named it.
        pinned: it keeps its place in the worker.
    """

    name: str
    path: str
    id: str = ""
    loaded_at: float = 0.0
    rank: int = 0
    is_found: bool = False
    pinned: bool = False

    @property
    def ref(self) -> AdapterRef:
        """The adapter as a request has it."""
        return AdapterRef(self.id, self.name, self.path)


class AdapterStore:
    """The adapters of a model.

    Args:
        directory: of the list, which one run of a server has.
        copies: directory of the copies, which may outlive the run.
        args: the flags of the model.
        max_loras: places of the worker, of which one is for adapters that are not pinned.
    """

    def __init__(self, directory: Path, copies: Path, args: ModelArgs, max_loras: int) -> None:
        self._directory = directory
        self._copies = copies
        self._args = args
        self._max_pinned = max_loras - 1
        self._lora_dir = Path(args.lora_dir).expanduser().absolute() if args.lora_dir else None
        self._list = directory / LIST_NAME
        self._stamp: disk.FileStamp | None = None
        self._entries: dict[str, AdapterEntry] = {}

    @classmethod
    def of_model(cls, server_dir: Path, model: str, config: ServerConfig) -> "AdapterStore":
        """Return the adapters of a model of a server.

        With --journal DIR the copies are below it: a later run that resumes requests has them.

        Args:
            server_dir: directory of the server's run.
            model: name of the model, where the server has several; "": it is the only one.
            config: the flags of the model.
        """
        directory = server_dir / "adapters" / (_NO_DIRECTORY.sub("-", model) or "_")
        journal = config.scheduler.journal
        copies = Path(journal).absolute() / COPIES_NAME if journal else directory
        return cls(directory, copies, config.model, config.scheduler.max_loras)

    # --- names ------------------------------------------------------------------------------------

    @property
    def entries(self) -> dict[str, AdapterEntry]:
        """The loaded adapters by name. It is another object once the list has changed."""
        with suppress(FileNotFoundError):
            if (stamp := disk.file_stamp(self._list)) != self._stamp:
                self._entries = _read_list(self._list)
                self._stamp = stamp
        return self._entries

    def find(self, name: str) -> AdapterEntry | None:
        """Return the adapter that a request names: one that is loaded, or is in --lora-dir."""
        if not self._args.serves_adapters:
            return None
        if (entry := self.entries.get(name)) is not None:
            return entry
        is_plain = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
        if self._lora_dir is None or not is_plain or "/" in name or name.startswith("."):
            return None
        path = self._lora_dir / name
        has_files = any(file.is_file() for file in _possible_files(path))
        return AdapterEntry(name=name, path=str(path), is_found=True) if has_files else None

    def all(self) -> list[AdapterEntry]:
        """Return all adapters that requests can name, those that are loaded first."""
        names: list[str] = []
        if self._lora_dir is not None:
            with suppress(OSError):
                names = sorted(path.name for path in self._lora_dir.iterdir())
        loaded = self.entries
        found = (self.find(name) for name in names if name not in loaded)
        return [*loaded.values(), *(entry for entry in found if entry is not None)]

    def require(self, name: str) -> AdapterEntry:
        """Return a loaded adapter.

        Raises:
            InvalidRequest: no adapter has the name.
        """
        if (entry := self.entries.get(name)) is not None:
            return entry
        shown, names = name[:MAX_NAME_CHARS], [entry.name for entry in self.all()]
        near = similar(shown, names) or names[:5]
        advice = f"use {' or '.join(map(repr, near))}" if near else "none is loaded"
        if not self._args.serves_adapters:
            advice = "start the server with --lora-modules NAME=PATH, --lora-dir or --enable-lora"
        raise InvalidRequest(f"there is no adapter {shown!r}: {advice}", "adapter")

    def info(self) -> InfoValues:
        """Return what the server info says of the adapters, as docs/protocol.md lists it."""
        return {
            "adapter_names": [entry.name for entry in self.all()],
            "adapter_ids": {name: entry.id for name, entry in self.entries.items()},
            "adapter_directory": str(self._directory),
            "adapter_copies": str(self._copies),
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
        for module in self._args.adapter_modules:
            try:
                entry = self._entry(module.name, module.path)
            except InvalidRequest as error:
                raise ConfigError(f"--lora-modules {module.name}={module.path}: {error}") from None
            entries.append(msgspec.structs.replace(entry, pinned=module.pinned))
        self._change(lambda known: known.update({entry.name: entry for entry in entries}))

    def load(
        self, name: str, path: str, replace: bool = False, pinned: bool | None = None
    ) -> AdapterEntry:
        """Copy an adapter's files, and let requests name it.

        It takes as long as reading the files does.

        Args:
            name: not that of a model.
            path: of a PEFT directory or a GGUF file.
            replace: an adapter of this name is replaced: requests that have begun keep theirs.
            pinned: it keeps its place in the worker; None: as the adapter of this name does.

        Raises:
            InvalidRequest: the name is taken, the files are no adapter of the model, or too many
                are pinned.
        """
        known = self.entries.get(name)
        if known is None or replace:
            return self._put(self._entry(name, path), pinned)
        if known.id != _identity(path):
            raise InvalidRequest(
                f"adapter {name!r} is loaded from {known.path}: unload it first, or send"
                " load_inplace true",
                "lora_name",
            )
        return known if pinned in (None, known.pinned) else self._put(known, pinned)

    def load_found(self, name: str) -> AdapterEntry:
        """Load an adapter of --lora-dir, unless it is loaded. Raise InvalidRequest."""
        found = self.find(name)
        if found is None or found.id:
            return self.require(name)
        return self._put(self._entry(name, found.path, is_found=True), None)

    def unload(self, name: str) -> AdapterEntry:
        """Take a name back. Requests that have begun go on. Raise InvalidRequest."""
        entry = self.require(name)
        self._change(lambda entries: entries.pop(name, None))
        return entry

    def put_back(self, name: str, entry: AdapterEntry | None) -> None:
        """Let a name be that of an earlier adapter again; None: of none."""
        if entry is None:
            self._change(lambda entries: entries.pop(name, None))
        else:
            self._put(entry, entry.pinned)

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

    def _put(self, entry: AdapterEntry, pinned: bool | None) -> AdapterEntry:
        """Let a name be that of an adapter. Return the entry that the list has.

        Args:
            entry: the adapter.
            pinned: as in `load`.

        Raises:
            InvalidRequest: too many others are pinned.
        """
        put: list[AdapterEntry] = []

        def change(entries: dict[str, AdapterEntry]) -> None:
            before = entries.get(entry.name)
            is_pinned = pinned if pinned is not None else before is not None and before.pinned
            others = [e.name for e in entries.values() if e.pinned and e.name != entry.name]
            if is_pinned and len(others) >= self._max_pinned:
                raise InvalidRequest(
                    f"adapter {entry.name!r} cannot be pinned, as {len(others)} are and at most"
                    f" {self._max_pinned} can be: --max-loras is {self._max_pinned + 1}, and one"
                    " place is for those that are not; unload or unpin one of"
                    f" {others[:5]}, or start with a larger --max-loras",
                    "pinned",
                )
            entries[entry.name] = msgspec.structs.replace(entry, pinned=is_pinned)
            put.append(entries[entry.name])

        self._change(change)
        return put[0]

    def sweep(self, used: Collection[str], num_kept: int) -> list[str]:
        """Remove the copies that nothing needs, and return their ids.

        Args:
            used: ids of the adapters of open requests.
            num_kept: adapters of --lora-dir that stay loaded, those that were loaded last.
        """
        found = [e for e in self.entries.values() if e.is_found and not e.pinned]
        found = [entry for entry in found if entry.id not in used]
        surplus = sorted(found, key=lambda entry: entry.loaded_at)[: max(0, len(found) - num_kept)]
        if surplus:
            names = {entry.name for entry in surplus}
            self._change(lambda entries: [entries.pop(name, None) for name in names])
        named = {entry.id for entry in self.entries.values()}
        removed = []
        for path in self._copies.iterdir() if self._copies.is_dir() else ():
            if path.name in named or path.name in used or not path.is_dir():
                continue
            with suppress(OSError):
                if clock.now() - path.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(path)
                    removed.append(path.name)
        return removed

    def files(self, adapter: AdapterRef) -> Path:
        """Return where the files of an adapter are, as `files_of`."""
        return files_of(adapter, self._copies)

    # --- files ------------------------------------------------------------------------------------

    def _copy(self, source: Path) -> Path:
        """Return the copy of an adapter's files, whose name is its id."""
        try:
            disk.make_directory(self._copies)
            scratch = Path(tempfile.mkdtemp(prefix=".", dir=self._copies))
            try:
                for path in _possible_files(source):
                    if path.is_file():
                        shutil.copyfile(path, scratch / path.name)
                copy = self._copies / adapter_id(_content(scratch))
                with suppress(OSError):  # another load has made it
                    os.rename(scratch, copy)
                os.utime(copy)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        except OSError as error:
            raise InvalidRequest(
                f"the files of {source} cannot be copied to {self._copies}: {error.strerror}",
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


def files_of(adapter: AdapterRef, *directories: Path) -> Path:
    """Return where the files of an adapter are: the copy, else those that it was made of.

    The latter may have another content by now, or be missing.

    Args:
        adapter: the adapter.
        directories: where copies are.
    """
    for copy in (directory / adapter.id for directory in directories):
        if copy.is_dir():
            return _content(copy)
    return Path(adapter.path)


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _identity(path: str) -> str:
    """Return the id of the adapter at a path. Raise InvalidRequest."""
    try:
        return adapter_id(_absolute(path))
    except ModelError as error:
        raise InvalidRequest(str(error), "lora_path") from None


def _possible_files(path: Path) -> list[Path]:
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
