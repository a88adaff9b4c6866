"""deploy/logrotate.conf rotates the usage log of a server under load and keeps each line once."""

import asyncio
import grp
import gzip
import json
import os
import pwd
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from quadriga.client import AsyncClient
from quadriga.sampling.params import SamplingParams
from tests.server import ROOT, running_server, wait_until

CONF = ROOT / "deploy" / "logrotate.conf"
LOGROTATE = shutil.which("logrotate") or shutil.which("logrotate", path="/usr/sbin")
NUM_CLIENTS, NUM_ROTATIONS = 8, 4


def rotate(home: Path) -> None:
    """Rotate now, as `logrotate -f` does at any time."""
    time.sleep(1.1)  # the names of rotated files have the second
    assert LOGROTATE
    text = CONF.read_text()
    assert "/var/lib/quadriga/usage.jsonl" in text
    assert "su quadriga quadriga" in text
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    text = text.replace("/var/lib/quadriga/usage.jsonl", str(home / "usage.jsonl"))
    config = home / "logrotate.conf"
    config.write_text(text.replace("su quadriga quadriga", f"su {user} {group}"))
    config.chmod(0o644)
    command = [LOGROTATE, "-f", "-s", str(home / "state"), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def lines_of(path: Path) -> list[str]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    assert text.endswith("\n")
    return [json.loads(line)["request"] for line in text.splitlines()]


def test_no_line_is_lost_or_written_twice_while_the_log_rotates_under_load(
    llama_dir: Path, tmp_path: Path
) -> None:
    if LOGROTATE is None:
        pytest.skip("no logrotate: install it")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    usage = home / "usage.jsonl"
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--usage-log", str(usage)]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)

    async def load(endpoint: str) -> int:
        """Send requests until the log has been rotated several times; return their number."""
        is_rotated = asyncio.Event()

        async def client() -> int:
            count = 0
            async with AsyncClient(endpoint) as connection:
                while not is_rotated.is_set():
                    await connection.generate([5], params)
                    count += 1
            return count

        clients = asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        for _ in range(NUM_ROTATIONS):
            await asyncio.to_thread(wait_until, usage.exists, 30)
            await asyncio.to_thread(rotate, home)
        is_rotated.set()
        return sum(await clients)

    with running_server(tmp_path / "log", *flags) as server:
        num_requests = asyncio.run(load(server.endpoint))
        pid = server.pid_of("worker_proc")
        if usage.exists():
            rotate(home)
        before = {path: path.stat().st_size for path in home.glob("usage.jsonl-*")}
        asyncio.run(one_more(server.endpoint, params))
        wait_until(usage.exists, 10)
        assert {path: path.stat().st_size for path in before} == before
        assert server.pid_of("worker_proc") == pid, "a rotation reloads no model"
    files = list(home.glob("usage.jsonl*"))
    assert len(files) >= NUM_ROTATIONS, files
    assert any(path.suffix == ".gz" for path in files)
    found = Counter(line for path in files for line in lines_of(path))
    assert set(found.values()) == {1}
    assert len(found) == num_requests + 1


async def one_more(endpoint: str, params: SamplingParams) -> None:
    async with AsyncClient(endpoint) as connection:
        await connection.generate([5], params)
