"""What stands in place of a file is refused in one line that names it, and nothing waits for it."""

import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from http_proc.apis.responses.database import Database, StorageError
from http_proc.jobs.batch_lines import LineLog
from http_proc.jobs.files import FileStore
from http_proc.server import tls_context
from http_proc.web.stream_rows import FILE_NAME, StreamRows
from quadriga import disk
from quadriga.errors import ConfigError, ModelError
from quadriga.server.config.frontend_args import HttpArgs
from quadriga.server.config.server_config import read_config
from quadriga.server.models.formats.directory import find_problem, read_json
from quadriga.server.models.resolve import find_chat_template
from quadriga.server.tenants import add_tenant, read_tenants
from quadriga.wire.curve import AllowList, load_pair, make_client_keys, make_server_keys
from scheduler_proc.journal.recovery import read_journal
from scheduler_proc.observe.logs import UsageLog
from worker_proc.kv_tiers.tiers import PageFiles

pytestmark = pytest.mark.timeout(20)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_directory(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


KINDS = [make_fifo, make_socket, make_device, make_directory, make_loop]
Make = Callable[[Path], None]


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__.removeprefix("make_"))
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes something that is no regular file."""
    made: Make = request.param
    return made


@pytest.fixture
def other(make: Make, tmp_path: Path) -> Path:
    """Return a path at which no regular file is."""
    path = tmp_path / "other"
    make(path)
    return path


def test_a_file_is_opened_only_if_it_is_one(other: Path, tmp_path: Path) -> None:
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError, match=r"not a regular file|symbolic links") as raised:
            disk.open_regular(other, flags)
        assert raised.value.filename == str(other)
    path = tmp_path / "file"
    os.close(disk.open_regular(path, os.O_WRONLY | os.O_CREAT))
    assert path.stat().st_mode & 0o777 == disk.FILE_MODE
    path.write_text("text")
    assert disk.read_text(path) == "text" and disk.read_bytes(path) == b"text"


READS: dict[str, Callable[[Path], Any]] = {
    "config": lambda path: read_config(path, {}),
    "keys": read_tenants,
    "model": read_json,
    "template": lambda path: find_chat_template(str(path)),
    "certificate": lambda path: tls_context(HttpArgs(ssl_certfile=str(path))),
    "curve": lambda path: load_pair(path.parent, path.name.removesuffix(".key_secret")),
    "keys add": lambda path: add_tenant(path, "fox", {}),
}


@pytest.mark.parametrize("name", READS)
def test_files_of_the_operator_are_refused_by_name(make: Make, tmp_path: Path, name: str) -> None:
    path = tmp_path / "named.key_secret"
    make(path)
    if make is make_loop and not path.exists() and name in ("model", "keys add"):
        return  # as without a file
    with pytest.raises((ConfigError, ModelError), match=r"named") as raised:
        READS[name](path)
    assert "\n" not in str(raised.value)


def test_weights_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    make(tmp_path / "model.safetensors")
    assert "model.safetensors" in str(find_problem(tmp_path, True, True))


def test_files_of_the_data_directory_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    for name in ("file-1.json", "file-1.content"):
        path = tmp_path / "files" / name
        path.parent.mkdir(exist_ok=True)
        make(path)
    with pytest.raises(OSError, match="file-1"):
        FileStore(tmp_path / "files", 1, 1, None).open()  # type: ignore[arg-type]
    make(tmp_path / "answers")
    with pytest.raises(OSError, match="answers"):
        list(LineLog(tmp_path / "answers", tmp_path / "failures").open())


@pytest.mark.parametrize("ending", ["", "-wal", "-journal"])
def test_databases_are_refused_by_name(
    make: Make, tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / f"{FILE_NAME}{ending}")
    rows = StreamRows(tmp_path)
    assert rows.has_failed
    rows.close()
    assert any(f"{FILE_NAME}{ending}" in line for line in caplog.messages)
    make(tmp_path / f"base{ending}")
    database = Database(tmp_path / "base", "", lambda _: None, True)
    with pytest.raises(StorageError, match=f"base{ending}"):
        database._read(lambda _: None)
    database._close()


def test_a_journal_is_refused_by_name(other: Path) -> None:
    with pytest.raises(OSError, match="other"):
        read_journal(other)


def test_a_usage_log_without_a_reader_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "usage")
    with pytest.raises(ConfigError, match="usage"):
        UsageLog(str(tmp_path / "usage"))


def test_a_revoked_key_is_no_file(make: Make, tmp_path: Path) -> None:
    make_server_keys(tmp_path)
    hand_out = make_client_keys(tmp_path, "fox")
    allowed = tmp_path / "clients" / "fox.key"
    allowed.unlink()
    make(allowed)
    assert load_pair(hand_out, "client").public not in AllowList(tmp_path)


def test_pages_on_disk_are_passed_over_and_named(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, name, page = b"n" * 16, b"p" * 16, np.zeros(64, np.uint8)
    files = PageFiles(tmp_path, namespace, 64, 1 << 20)
    path = Path(files._path(name))
    files.close()
    path.parent.mkdir(parents=True)
    make(path)
    make(path.with_name(path.name + ".new"))
    files = PageFiles(tmp_path, namespace, 64, 1 << 20)
    assert name not in files and not files.read(name, [page])
    assert len([line for line in caplog.messages if path.name in line]) == 2
    files.write(name, page)
    assert files.has_failed and any(".new" in line for line in caplog.messages)
    files.close()


def test_the_lock_of_pages_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "lock")
    with pytest.raises(ConfigError, match="lock"):
        PageFiles(tmp_path, b"n" * 16, 64, 1 << 20)


def test_a_certificate_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("none")
    with pytest.raises(ConfigError, match="cert"):
        tls_context(HttpArgs(ssl_certfile=str(tmp_path / "cert")))
    assert isinstance(ssl.create_default_context(), ssl.SSLContext)
