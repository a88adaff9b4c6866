"""The commands of docs/upgrade.md back up a server and restore it on an empty directory."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.client.server import free_port
from quadriga.server.cli.main import main
from tests.old_data import Gateway
from tests.old_data import flags as flags_of
from tests.server import launch, stop, wait_until, wait_until_ready
from tests.users_book import DOCS, fences

MODEL = DOCS.parent / "tests" / "fixtures" / "version_0_1_0" / "model"
PAGE = DOCS / "upgrade.md"
STREAM = {"prompt": "fox", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True,
          "resumable": True}  # fmt: skip

TIMINGS = re.compile(rb'"timings":\{[^}]*\}')  # of the run that took the stream to its end


def commands(word: str) -> list[str]:
    """Return the lines of the example of the page that has a word."""
    (found,) = [block.source for block in fences(PAGE) if word in block.source]
    return [line.strip() for line in found.splitlines()]


class Machine:
    """A root directory with the state of a service, whose server runs in the foreground.

    Args:
        root: stands for /.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "var" / "lib" / "quadriga"
        self._num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Gateway:
        """Start the server, with the flags of the service that concern its state."""
        port, self._num_starts = free_port(), self._num_starts + 1
        log = self.root / f"log-{self._num_starts}"
        more = ["--resume", "--keys", str(self.state / "keys.yaml"), "--insecure"]
        more += ["--usage-log", str(self.state / "usage.jsonl")]
        flags = flags_of(MODEL, self.state / "journal", port)
        self._process = launch(f"tcp://127.0.0.1:{free_port()}", *flags, *more, log=log)
        wait_until_ready(self._process, log)
        return Gateway(port)

    def stop(self) -> None:
        """Stop the server in order."""
        if self._process is not None:
            assert stop(self._process) == 0
        self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let no process of the server run, as a snapshot sees it."""
        assert self._process is not None
        launcher = psutil.Process(self._process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        yield
        for process in reversed(family):
            process.send_signal(signal.SIGCONT)

    def run(self, lines: list[str], backups: Path) -> Gateway | None:
        """Run commands of the page here; return the gateway if they start the server."""
        gateway = None
        for line in lines:
            if line == "systemctl stop quadriga":
                self.stop()
            elif line == "systemctl start quadriga":
                gateway = self.start()
            else:
                here = line.replace("--directory /", f"--directory {self.root}")
                here = here.replace("/var/backups", str(backups))
                here = here.replace(" /var/lib/quadriga", f" {self.state}")
                here = here.replace("quadriga:quadriga", f"{os.getuid()}:{os.getgid()}")
                subprocess.run(here, shell=True, check=True, timeout=60)
        return gateway


def fill(gateway: Gateway) -> dict[str, str]:
    """Leave something of each kind; return the ids."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": "a", "max_tokens": 5}}  # fmt: skip
    file = gateway.upload((json.dumps(line) + "\n").encode())
    batch = gateway.batch(file)["id"]
    wait_until(lambda: gateway.ask(f"/v1/batches/{batch}")["status"] == "completed", 60)
    response = gateway.ask("/v1/responses", {"input": "Hi", "max_output_tokens": 8})["id"]
    talk = gateway.ask("/v1/conversations", {"metadata": {"topic": "foxes"}})["id"]
    gateway.ask("/v1/responses", {"input": "Go", "max_output_tokens": 4, "conversation": talk})
    return {"file": file, "batch": batch, "response": response, "conversation": talk}


def answers(gateway: Gateway, ids: dict[str, str]) -> dict[str, Any]:
    """Return everything that the server says about what it keeps."""
    batch = gateway.ask(f"/v1/batches/{ids['batch']}")
    return {
        "batch": batch,
        "output": gateway.read(f"/v1/files/{batch['output_file_id']}/content"),
        "file": gateway.read(f"/v1/files/{ids['file']}/content"),
        "files": gateway.ask("/v1/files"),
        "response": gateway.ask(f"/v1/responses/{ids['response']}"),
        "items": gateway.ask(f"/v1/conversations/{ids['conversation']}/items"),
    }


@pytest.fixture
def machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[Machine, str]]:
    """A machine with a key, which is the second value."""
    machine = Machine(tmp_path / "old")
    machine.state.mkdir(parents=True)
    (machine.root / "etc" / "quadriga").mkdir(parents=True)
    (machine.root / "etc" / "quadriga" / "quadriga.yaml").write_text("model: tiny\n")
    main(["keys", "add", "alice", "--keys", str(machine.state / "keys.yaml")])
    yield machine, capsys.readouterr().out.split()[-1]
    machine.stop()


def keyed(gateway: Gateway, key: str) -> Gateway:
    gateway.headers = {"Authorization": f"Bearer {key}"}
    return gateway


@pytest.mark.timeout(240)
def test_a_backup_is_restored_on_an_empty_directory(
    machine: tuple[Machine, str], tmp_path: Path
) -> None:
    old, key = machine
    gateway = keyed(old.start(), key)
    ids = fill(gateway)
    before = answers(gateway, ids)
    again = old.run(commands("tar --create"), tmp_path)
    assert again is not None
    assert answers(keyed(again, key), ids) == before, "the server that was backed up goes on"
    usage = (old.state / "usage.jsonl").read_text()
    old.stop()
    shutil.rmtree(old.root)

    new = Machine(tmp_path / "new")
    new.root.mkdir()
    restored = new.run(commands("tar --extract"), tmp_path)
    try:
        assert restored is not None
        assert answers(keyed(restored, key), ids) == before
        assert (new.state / "usage.jsonl").read_text().startswith(usage[: len(usage) // 2])
        assert (new.root / "etc" / "quadriga" / "quadriga.yaml").read_text() == "model: tiny\n"
        body = {"input": "And?", "previous_response_id": ids["response"], "max_output_tokens": 4}
        assert restored.ask("/v1/responses", body)["status"] == "incomplete"
    finally:
        new.stop()


@pytest.mark.timeout(240)
def test_a_snapshot_of_a_running_server_is_one_that_it_goes_on_from(
    machine: tuple[Machine, str], tmp_path: Path
) -> None:
    old, key = machine
    gateway = keyed(old.start(), key)
    ids = fill(gateway)
    before = answers(gateway, ids)
    begin = b""
    headers = {"X-Request-Id": "fox-1"}
    with gateway.open("/v1/completions", STREAM, headers) as stream:
        while begin.count(b"\n\n") < 3:
            begin += stream.readline()
        with old.frozen():
            shutil.copytree(old.root, tmp_path / "new")
        whole = begin + stream.read()
    old.stop()

    new = Machine(tmp_path / "new")
    restored = keyed(new.start(), key)
    try:
        assert answers(restored, ids) == before
        taken_up = restored.read("/v1/streams/fox-1", headers={"Last-Event-ID": "0"})
        assert TIMINGS.sub(b"", taken_up) == TIMINGS.sub(b"", whole)
    finally:
        new.stop()
