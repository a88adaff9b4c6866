"""Clients without a key get nothing, and the wire cannot be read.

The tokenizer process alone is started: it answers pings and tokenizes by itself.
"""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.errors import ConfigError, DeadlineExceeded, QuadrigaError, ServerUnreachable
from quadriga.server.cli.main import main
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.curve import ALLOWED, HAND_OUT, make_client_keys, make_server_keys
from tests.server import ROOT
from tests.tcp_proxy import TcpProxy

TIMEOUT_S = 30.0
SECRET_TEXT = "the launch code is oranges, oranges, oranges"


@contextlib.contextmanager
def frontend(model: Path, keys: Path | None = None) -> Iterator[str]:
    """Start a frontend without a ring, with the keys of a server, and yield its endpoint."""
    flags = [] if keys is None else ["--curve-dir", str(keys)]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tokenizer_proc", "--model", str(model)]
    with tempfile.TemporaryDirectory(prefix="q-") as run_dir:
        process = subprocess.Popen(
            [*command, "--run-dir", run_dir, "--endpoint", endpoint, *flags], cwd=ROOT
        )
        try:
            with Client(endpoint, TIMEOUT_S, curve_dir=keys) as client:
                assert client.tokenize("x")
            yield endpoint
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_server_keys(directory)
    make_client_keys(directory, "ann")
    return directory


@pytest.fixture(scope="module")
def locked(llama_dir: Path, keys: Path) -> Iterator[str]:
    with frontend(llama_dir, keys) as endpoint:
        yield endpoint


def on_the_wire(endpoint: str, keys: Path | None) -> bytes:
    """Return the bytes on the wire while a text is tokenized."""

    def ask(endpoint: str) -> None:
        with Client(endpoint, TIMEOUT_S, curve_dir=keys) as client:
            assert client.detokenize(client.tokenize(SECRET_TEXT)) == SECRET_TEXT

    async def run() -> bytes:
        proxy = TcpProxy()
        async with proxy.open(endpoint) as proxied:
            await asyncio.to_thread(ask, proxied)
        return bytes(proxy.bytes)

    return asyncio.run(run())


def test_the_wire_has_no_plain_text(locked: str, llama_dir: Path, keys: Path) -> None:
    seen = on_the_wire(locked, keys / HAND_OUT / "ann")
    assert len(seen) > 500
    for word in (b"oranges", b"detokenize", b"tokens"):
        assert word not in seen
    with frontend(llama_dir) as plain:
        assert b"oranges" in on_the_wire(plain, None), "this test would see it"


def unreachable(endpoint: str, keys: Path | None) -> str:
    with pytest.raises(ServerUnreachable) as caught, Client(endpoint, 3.0, curve_dir=keys):
        pass
    return str(caught.value)


def test_without_a_key_with_a_wrong_one_and_with_a_revoked_one_nothing_comes(
    locked: str, keys: Path, tmp_path: Path
) -> None:
    assert "docs/security.md" in unreachable(locked, None)
    stranger = tmp_path / "stranger"
    make_server_keys(stranger)
    wrong_server = make_client_keys(stranger, "eve")
    assert "see docs/security.md" in unreachable(locked, wrong_server)
    (wrong_server / "server.key").write_bytes((keys / "server.key").read_bytes())
    assert "does not know this client's key" in unreachable(locked, wrong_server)
    bob = make_client_keys(keys, "bob")
    with Client(locked, TIMEOUT_S, curve_dir=bob) as client:
        assert client.tokenize("x")
    (keys / ALLOWED / "bob.key").unlink()
    assert "does not know this client's key" in unreachable(locked, bob)


def test_a_key_that_is_revoked_while_its_client_is_connected_is_worth_nothing_from_then_on(
    locked: str, keys: Path
) -> None:
    with Client(locked, TIMEOUT_S, curve_dir=make_client_keys(keys, "carl")) as client:
        assert client.tokenize("x")
        (keys / ALLOWED / "carl.key").unlink()
        with pytest.raises(DeadlineExceeded):
            client._loop.run(lambda: client._async.tokenize("x", timeout=0.5))
    with Client(locked, TIMEOUT_S, curve_dir=keys / HAND_OUT / "ann") as client:
        assert client.tokenize("x"), "others are not disturbed"


def test_a_client_that_uses_keys_at_a_server_without_says_so(llama_dir: Path, keys: Path) -> None:
    with frontend(llama_dir) as plain:
        assert "docs/security.md" in unreachable(plain, keys / HAND_OUT / "ann")


def test_other_machines_are_served_only_with_keys_or_with_a_word_that_says_insecure(
    keys: Path,
) -> None:
    def config(endpoint: str, **flags: object) -> None:
        ServerConfig().replace(endpoint=endpoint, **flags).validate()

    for endpoint in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555", "tcp://10.0.0.1:1"):
        with pytest.raises(ConfigError, match="quadriga keygen DIR and add --curve-dir"):
            config(endpoint)
        config(endpoint, insecure=True)
        config(endpoint, curve_dir=str(keys))
    for endpoint in ("tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555"):
        config(endpoint)


def test_keygen_makes_the_keys_of_server_and_client_and_prints_the_next_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "keys"
    assert main(["keygen", str(directory), "dora"]) == 0
    output = capsys.readouterr().out
    assert f"--curve-dir {directory}" in output
    assert "to dora" in output
    for secret in (directory / "server.key_secret", directory / "hand-out/dora/client.key_secret"):
        assert secret.stat().st_mode & 0o077 == 0
    assert directory.stat().st_mode & 0o077 == 0
    before = (directory / "server.key").read_bytes()
    assert main(["keygen", str(directory), "dora"]) == 1
    assert "choose another name" in capsys.readouterr().err
    assert main(["keygen", str(directory), "../x"]) == 1
    assert (directory / "server.key").read_bytes() == before


def test_a_directory_without_keys_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuadrigaError, match="no key in"), Client(curve_dir=tmp_path):
        pass
