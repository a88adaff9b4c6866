"""A crew says why its machine cannot run a replica."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_proc.crew import check_inner_key
from quadriga.errors import ConfigError
from quadriga.wire.curve import inner_key_id, make_server_keys

TIMEOUT_S = 60.0


def test_a_machine_without_the_servers_inner_key_is_named(tmp_path: Path) -> None:
    make_server_keys(tmp_path / "server")
    make_server_keys(tmp_path / "machine")
    expected = inner_key_id(str(tmp_path / "server"))
    check_inner_key(str(tmp_path / "server"), expected, "10.0.0.7")
    check_inner_key("", "", "10.0.0.7")
    with pytest.raises(ConfigError, match=r"machine on 10\.0\.0\.7 is another one"):
        check_inner_key(str(tmp_path / "machine"), expected, "10.0.0.7")
    with pytest.raises(ConfigError, match=r"no key in .*nowhere"):
        check_inner_key(str(tmp_path / "nowhere"), expected, "10.0.0.7")


def test_a_crew_with_another_key_starts_no_process_and_reports_why(
    tmp_path: Path, llama_dir: Path
) -> None:
    make_server_keys(tmp_path)
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    flags = ["--replica", "0", "--node-host", "127.0.0.1", "--inner-key-id", "f" * 32]
    flags += ["--delivery-address", "tcp://127.0.0.1:9", "--control-fd", str(theirs.fileno())]
    flags += ["--model", str(llama_dir), "--curve-dir", str(tmp_path)]
    crew = subprocess.Popen(
        [sys.executable, "-m", "cluster_proc.crew", *flags], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    try:
        with ours.makefile() as lines:
            report = json.loads(lines.readline())
        assert report["report"] == "lost"
        assert report["reason"].startswith("machine 127.0.0.1: ConfigError: the inner key in")
        assert crew.wait(TIMEOUT_S) == 3
    finally:
        crew.kill()
        crew.wait()
