"""Which keys may connect, while their files are added, removed, overwritten and broken."""

import os
from pathlib import Path

import pytest
import zmq
import zmq.auth

from quadriga.wire import curve
from quadriga.wire.curve import (
    ALLOWED,
    SERVER,
    AllowList,
    load_pair,
    make_client_keys,
    make_server_keys,
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_server_keys(tmp_path)
    make_client_keys(tmp_path, "ann")
    make_client_keys(tmp_path, "bob")
    return tmp_path


def file_of(keys: Path, name: str) -> Path:
    return keys / ALLOWED / f"{name}.key"


def key_of(keys: Path, name: str) -> bytes:
    return zmq.auth.load_certificate(file_of(keys, name))[0]


def overwrite(path: Path, old: bytes, new: bytes) -> None:
    """Overwrite a key in place: the directory's time stays, and the file's time is later."""
    before = path.stat()
    with path.open("r+b") as file:
        text = file.read().replace(old, new)
        file.seek(0)
        file.write(text)
        file.truncate()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_a_key_whose_file_is_overwritten_is_revoked_at_once_and_the_new_one_is_good(
    keys: Path,
) -> None:
    allowed, old, (new, _) = AllowList(keys), key_of(keys, "ann"), zmq.curve_keypair()
    assert old in allowed
    assert new not in allowed
    overwrite(file_of(keys, "ann"), old, new)
    assert old not in allowed
    assert new in allowed
    assert key_of(keys, "bob") in allowed


def test_a_new_key_in_an_old_file_is_found_within_the_time_that_the_docs_say(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, old, (new, _) = AllowList(keys), key_of(keys, "ann"), zmq.curve_keypair()
    assert new not in allowed
    overwrite(file_of(keys, "ann"), old, new)
    assert new not in allowed, "unknown keys do not have the files read at will"
    monkeypatch.setattr(curve, "RECHECK_INTERVAL_S", 0.0)
    assert new in allowed
    assert old not in allowed


def test_files_that_come_and_go_count_at_once(keys: Path) -> None:
    allowed, bob = AllowList(keys), key_of(keys, "bob")
    assert bob in allowed
    file_of(keys, "bob").unlink()
    assert bob not in allowed
    make_client_keys(keys, "carl")
    assert key_of(keys, "carl") in allowed
    assert load_pair(keys, SERVER).public in allowed


def test_unreadable_key_files_allow_no_client_and_valid_keys_still_work(keys: Path) -> None:
    allowed = AllowList(keys)
    file_of(keys, "broken").write_bytes(b"\xff no key")
    file_of(keys, "empty").touch()
    file_of(keys, "directory").mkdir()
    file_of(keys, "dangling").symlink_to(keys / "nowhere")
    assert key_of(keys, "ann") in allowed
    assert b"" not in allowed
    assert b"\xff" not in allowed


def test_only_what_has_changed_is_read_again(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, ann = AllowList(keys), key_of(keys, "ann")
    read: list[str] = []
    assert ann in allowed
    load = zmq.auth.load_certificate

    def counted_load(path: str) -> object:
        read.append(path)
        return load(path)

    monkeypatch.setattr(zmq.auth, "load_certificate", counted_load)
    assert all(ann in allowed for _ in range(100))
    assert read == []
    make_client_keys(keys, "carl")
    read.clear()
    assert ann in allowed
    assert read == [str(file_of(keys, "carl"))]


def test_without_the_key_directory_no_client_is_allowed_until_it_is_back(keys: Path) -> None:
    allowed, ann = AllowList(keys), key_of(keys, "ann")
    assert ann in allowed
    (keys / ALLOWED).rename(keys / "elsewhere")
    assert ann not in allowed
    (keys / "elsewhere").rename(keys / ALLOWED)
    assert ann in allowed
