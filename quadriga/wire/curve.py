"""Keys for the public socket: CURVE, ZeroMQ's encryption and authentication by elliptic curves.

A server's directory, made by `quadriga keygen DIR NAME…`:

    server.key_secret, server.key    the server's key pair; the second is public
    inner.key_secret, inner.key      key pair of links between the server's machines; both secret
    clients/NAME.key                 public key of a client that may connect; removing the file
                                     revokes it
    hand-out/NAME/                   directory for that client: client.key_secret and server.key
"""

import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from quadriga import disk
from quadriga.errors import ConfigError
from quadriga.wire.async_sockets import AsyncPort

SERVER, CLIENT, INNER = "server", "client", "inner"
PUBLIC, SECRET = ".key", ".key_secret"
ALLOWED, HAND_OUT = "clients", "hand-out"
# ZAP domain of the links between the server's machines, where only the inner key may connect.
INNER_DOMAIN = "inner"
# An unknown key triggers a new look at the files at most this often.
RECHECK_INTERVAL_S = 1.0


class KeyPair(NamedTuple):
    """Public and secret key in Z85, 40 characters each."""

    public: bytes
    secret: bytes


# --- files ----------------------------------------------------------------------------------------


def make_server_keys(directory: Path) -> bool:
    """Make the server's directory and key pair; return False if the pair exists."""
    disk.make_directory(directory)
    (directory / ALLOWED).mkdir(mode=0o700, exist_ok=True)
    if not (directory / (INNER + SECRET)).exists():
        _make_pair(directory, INNER)
        os.chmod(directory / (INNER + PUBLIC), 0o600)
    is_new = not (directory / (SERVER + SECRET)).exists()
    if is_new:
        _make_pair(directory, SERVER)
    disk.sync_tree(directory)
    return is_new


def make_client_keys(directory: Path, name: str) -> Path:
    """Make a client's key pair, allow it at the server, and return the directory to hand out.

    Raises:
        ConfigError: the name cannot be a file's, or it has a key already.
    """
    allowed = directory / ALLOWED / (name + PUBLIC)
    if not name or name in (".", "..") or os.sep in name:
        raise ConfigError(f"a client is called {name!r}: give it a name that can be a file's")
    if allowed.exists():
        raise ConfigError(f"{allowed} exists: choose another name, or remove it to revoke that key")
    hand_out = directory / HAND_OUT / name
    shutil.rmtree(hand_out, ignore_errors=True)
    hand_out.mkdir(mode=0o700, parents=True)
    _make_pair(hand_out, CLIENT)
    shutil.copy(directory / (SERVER + PUBLIC), hand_out)
    shutil.move(hand_out / (CLIENT + PUBLIC), allowed)
    disk.sync_tree(directory)
    return hand_out


def _make_pair(directory: Path, name: str) -> None:
    _, secret = zmq.auth.create_certificates(directory, name)
    os.chmod(secret, 0o600)


def load_pair(directory: Path, name: str) -> KeyPair:
    """Load a key pair. Raise ConfigError if there is none."""
    path = directory / (name + SECRET)
    try:
        disk.check_regular(path)
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no key in {path} ({error}); make one with: quadriga keygen") from None
    if secret is None:
        raise ConfigError(f"{path} has no secret key")
    return KeyPair(public, secret)


def inner_key_id(directory: str) -> str:
    """Return a name of a directory's inner key that does not give it away; "" without a directory.

    Raises:
        ConfigError: the directory has no inner key.
    """
    if not directory:
        return ""
    public = load_pair(Path(directory), INNER).public
    return hashlib.blake2b(public, digest_size=16, person=b"quadriga-inner").hexdigest()


class AllowList:
    """The public keys of a server's directory that may connect, including the server's own key.

    The web gateway connects with the server's key. A lookup costs two calls of stat: one of the
    directory, whose time changes when a file is added or removed, and one of the key's file, which
    may have been overwritten.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory / ALLOWED
        self._server_key = load_pair(directory, SERVER).public
        self._files: dict[str, KeyFile] = {}
        self._by_key: dict[bytes, KeyFile] = {}
        self._directory_stamp = -1
        self._read_at = -math.inf

    def __contains__(self, public_key: bytes) -> bool:
        if public_key == self._server_key:
            return True
        try:
            if self._directory.stat().st_mtime_ns != self._directory_stamp:
                self._read()
            file = self._by_key.get(public_key)
            if file is None:
                # A file may have been overwritten; the interval bounds the work for strangers.
                if time.monotonic() - self._read_at >= RECHECK_INTERVAL_S:
                    self._read()
            elif disk.file_stamp(file.path) != file.stamp:
                self._read()
        except OSError:
            self._files, self._by_key, self._directory_stamp = {}, {}, -1
        return public_key in self._by_key

    def name_of(self, public_key: bytes) -> str:
        """Return the name of a key that may connect; "" for the server's own."""
        file = self._by_key.get(public_key)
        return "" if file is None else Path(file.path).name.removesuffix(PUBLIC)

    def _read(self) -> None:
        """Read the files that are new or have changed. Raise OSError without the directory."""
        self._read_at = time.monotonic()
        self._directory_stamp = self._directory.stat().st_mtime_ns
        known, self._files = self._files, {}
        for path in map(str, self._directory.glob("*" + PUBLIC)):
            file = known.get(path)
            stamp = disk.file_stamp(path)
            if file is None or file.stamp != stamp:
                file = KeyFile(path, stamp, _public_key(path))
            self._files[path] = file
        self._by_key = {file.key: file for file in self._files.values() if file.key}


class KeyFile(NamedTuple):
    """A client's public key, b"" if the file has none, and the file's stamp."""

    path: str
    stamp: disk.FileStamp | None
    key: bytes


def _public_key(path: str) -> bytes:
    try:
        disk.check_regular(path)
        return zmq.auth.load_certificate(path)[0]
    except (OSError, ValueError):
        return b""


# --- sockets --------------------------------------------------------------------------------------


def secure_client(socket: "zmq.Socket[bytes]", directory: Path) -> None:
    """Set a client's keys on a socket that has not connected yet.

    Args:
        socket: the socket.
        directory: directory that was handed out to the client, or the server's own.

    Raises:
        ConfigError: a key is missing.
    """
    name = CLIENT if (directory / (CLIENT + SECRET)).exists() else SERVER
    pair, server = load_pair(directory, name), directory / (SERVER + PUBLIC)
    try:
        disk.check_regular(server)
        socket.curve_serverkey = zmq.auth.load_certificate(server)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"no key in {server} ({error}): ask the server's owner") from None
    socket.curve_publickey, socket.curve_secretkey = pair


class Guard:
    """The server's keys and its authentication of clients. Needs a running event loop.

    Make it before the socket is bound. Raises ConfigError if the server has no keys.

    Attributes:
        key_names: names of the keys of clients that have sent something, by address; "" for the
            server's own key. The owner of the port removes clients that are gone.
    """

    def __init__(self, directory: Path) -> None:
        self.key_names: dict[bytes, str] = {}
        self._pair = load_pair(directory, SERVER)
        self._allowed = AllowList(directory)
        self._authenticator = AsyncioAuthenticator(zmq.Context.instance())
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.configure_curve_callback(INNER_DOMAIN, _InnerKey(directory))

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002
        """Return whether a key may connect; called by zmq.auth."""
        return key in self._allowed

    def prepare(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the server's keys on a socket that is not bound yet."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._pair

    def port(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[bytes]], None],
        on_revoked: Callable[[bytes], None],
    ) -> AsyncPort:
        """Return a port that drops messages of clients whose key was revoked while connected.

        Args:
            socket: the public socket.
            on_frames: called with the frames of each other message.
            on_revoked: called with the client's address for each dropped message.
        """
        return _CheckedPort(socket, on_frames, self._allowed, self.key_names, on_revoked)

    def close(self) -> None:
        """Stop authenticating."""
        self._authenticator.stop()


class _InnerKey:
    """Authentication on the links between the server's machines."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002
        """Return whether a key may connect; called by zmq.auth."""
        return key == _public_key(str(self._directory / (INNER + PUBLIC)))


class _CheckedPort(AsyncPort):
    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[bytes]], None],
        allowed: AllowList,
        key_names: dict[bytes, str],
        on_revoked: Callable[[bytes], None],
    ) -> None:
        self._allowed = allowed
        self._key_names = key_names
        self._on_revoked = on_revoked
        super().__init__(socket, on_frames)

    def _next(self) -> list[bytes]:
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        public_key = str(frames[-1].get("User-Id")).encode()
        if public_key in self._allowed:
            self._key_names[frames[0].bytes] = self._allowed.name_of(public_key)
            return [frame.bytes for frame in frames]
        self._on_revoked(frames[0].bytes)
        return []
