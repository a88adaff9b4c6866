"""Names that an operator has moved between the models of a running server, and their file.

The gateway writes the file, into the directory of the server's run, and reads it after a restart;
the frontends read it for clients that ask at which endpoint a model is.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from quadriga import disk
from quadriga.errors import ConfigError

FILE_NAME = "aliases.json"
MAX_ALIAS_CHARS = 200
_HASH_BYTES = 8


class Alias(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name of a model that is not the model's own.

    Attributes:
        name: the alias.
        model: name of its model.
        canary_model: name of the model that gets a share of the requests; "": there is none.
        canary: that share, above 0 and below 1; 0: there is none.
    """

    name: str
    model: str
    canary_model: str = ""
    canary: float = 0.0

    def model_of(self, request_id: str) -> str:
        """Return the name of the model that answers a request.

        The same id always has the same model, and one that has the canary keeps it when the share
        grows: SHA-256 of alias and id gives a number below 1, and the canary has those below its
        share.

        Args:
            request_id: the X-Request-Id.
        """
        if not self.canary:
            return self.model
        text = f"{self.name} {request_id}".encode("utf-8", "surrogatepass")
        place = int.from_bytes(hashlib.sha256(text).digest()[:_HASH_BYTES], "big")
        return self.canary_model if place < self.canary * 256**_HASH_BYTES else self.model


def read_aliases(path: Path) -> list[Alias]:
    """Return the aliases of a file; none if there is no file.

    Raises:
        ConfigError: the file cannot be read, or is no list of aliases.
    """
    try:
        return msgspec.json.decode(disk.read_bytes(path), type=list[Alias])
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no list of aliases: {error}") from None


def write_aliases(path: Path, aliases: Iterable[Alias]) -> None:
    """Write the file. A reader sees the old list or the new one. Raise OSError."""
    disk.replace(path, msgspec.json.encode(list(aliases)))


class AliasFile:
    """The file as the frontends read it: again whenever it has changed.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: disk.FileStamp | None = None
        self._aliases: list[Alias] = []

    def endpoints(self, endpoints: Mapping[str, str]) -> dict[str, str]:
        """Return the endpoints of all names, those of moved aliases too.

        A canary gets nothing of an alias here: a client has all its requests at one endpoint.

        Args:
            endpoints: by the names and aliases that the server has started with.

        Raises:
            ConfigError: as read_aliases.
        """
        if (stamp := disk.file_stamp(self._path)) != self._stamp:
            self._aliases = read_aliases(self._path)
            self._stamp = stamp
        moved = {one.name: endpoints[one.model] for one in self._aliases if one.model in endpoints}
        return {**endpoints, **moved}
