"""What a power cut leaves of files: the disk of the tests, and the files that commands write."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga import disk
from quadriga.server.tenants import read_tenants
from quadriga.wire.curve import AllowList, load_pair
from tests.faults.power_cuts import NO_POWER_CUTS, DurableDisk
from tests.server import ROOT

pytestmark = pytest.mark.skipif(bool(NO_POWER_CUTS), reason=NO_POWER_CUTS or "-")

WRITE = """
import os, sys
from pathlib import Path
from quadriga import disk
root = Path(sys.argv[1])
def write(name, data, is_synced, in_directory):
    fd = os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(fd, data)
    if is_synced:
        os.fsync(fd)
    if in_directory:
        disk.sync_directory(root)
    os.close(fd)
write("synced", b"one", True, True)
write("content", b"one", False, True)
write("name", b"one", True, False)
write("synced", b" two", False, False)
os.unlink(root / "removed")
write("was", b" more", True, False)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with two files, which is durable."""
    directory = tmp_path / "root"
    directory.mkdir()
    (directory / "was").write_bytes(b"there")
    (directory / "removed").write_bytes(b"there")
    return directory


def run(power: DurableDisk, *command: str) -> None:
    environment = {**os.environ, **power.environment}
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=60, capture_output=True)


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_a_power_cut_takes_what_was_not_synced(root: Path, tmp_path: Path) -> None:
    power = DurableDisk(root, tmp_path)
    run(power, sys.executable, "-c", WRITE, str(root))
    power.cut()
    assert contents(root) == {
        "was": b"there more", "removed": b"there", "synced": b"one", "content": b"",
    }  # fmt: skip


def test_a_power_cut_may_leave_a_part_of_what_was_not_synced(root: Path, tmp_path: Path) -> None:
    found = set()
    for seed in range(12):
        power = DurableDisk(root, tmp_path)
        (root / "synced").unlink(missing_ok=True)
        (root / "removed").touch()
        run(power, sys.executable, "-c", WRITE, str(root))
        power.cut(random.Random(seed))
        found.add(contents(root)["synced"])
    assert {b"one", b"one two"} < found
    assert all(b"one two".startswith(data) for data in found)


def test_replaced_files_and_made_directories_are_durable(root: Path, tmp_path: Path) -> None:
    power = DurableDisk(root, tmp_path)
    program = (
        "import sys; from pathlib import Path; from quadriga import disk;"
        "path = Path(sys.argv[1]); disk.make_directory(path / 'a/b/c');"
        "disk.replace(path / 'was', b'new'); disk.replace(path / 'a/b/c/d', b'deep')"
    )
    run(power, sys.executable, "-c", program, str(root))
    power.cut()
    assert (root / "was").read_bytes() == b"new"
    assert (root / "a/b/c/d").read_bytes() == b"deep"
    assert (root / "a/b").stat().st_mode & 0o777 == disk.DIRECTORY_MODE


def test_a_key_that_was_shown_is_in_its_file(root: Path, tmp_path: Path) -> None:
    power, keys = DurableDisk(root, tmp_path), root / "keys.yaml"
    program = "import sys; from quadriga.server.cli.main import main; sys.exit(main())"
    quadriga = (sys.executable, "-c", program, "keys")
    run(power, *quadriga, "add", "--keys", str(keys), "fox")
    power.cut()
    assert [tenant.name for tenant in read_tenants(keys)] == ["fox"]
    run(power, *quadriga, "remove", "--keys", str(keys), "fox")
    power.cut()
    assert read_tenants(keys) == []


def test_keys_of_the_ring_are_durable(root: Path, tmp_path: Path) -> None:
    power, directory = DurableDisk(root, tmp_path), root / "new" / "curve"
    program = (
        "import sys; from pathlib import Path; from quadriga.wire import curve;"
        "path = Path(sys.argv[1]); curve.make_server_keys(path); curve.make_client_keys(path, 'a')"
    )
    run(power, sys.executable, "-c", program, str(directory))
    power.cut()
    assert load_pair(directory, "server").secret
    client = load_pair(directory / "hand-out" / "a", "client")
    assert client.public in AllowList(directory)
