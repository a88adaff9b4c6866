"""The list of a server's models: a file that the launcher writes and the gateway reads.

The first model is the default: it answers requests that name none.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from quadriga import disk
from quadriga.errors import ConfigError


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a server.

    Attributes:
        name: what clients see, in answers and in lists.
        endpoint: address of the public socket of the model's frontend.
        aliases: further names by which requests may call the model.
        flags: command line of the model's own ServerConfig, as `from_argv` reads it.
        lost: why the model's processes have ended for good; "": they have not.
        preload: the server is ready when the model is loaded; else a request loads it.
    """

    name: str
    endpoint: str
    aliases: list[str] = []
    flags: list[str] = []
    lost: str = ""
    preload: bool = True


class ModelLoad(msgspec.Struct, frozen=True):
    """Whether a model is loaded, as the launcher reports it to the gateway.

    Attributes:
        state: loaded, loading, unloading, unloaded or failed.
        num_bytes: memory of its workers: measured, or before they were ever loaded estimated.
        idle_s: seconds without a request after which it is unloaded; None: never.
        used_at: time.monotonic() of its last use. While it has requests, that is now.
        num_loads, num_unloads: how often it was loaded and unloaded.
    """

    state: str
    num_bytes: int = 0
    idle_s: float | None = None
    used_at: float = 0.0
    num_loads: int = 0
    num_unloads: int = 0


def read_models(path: Path) -> list[ModelEntry]:
    """Return the models of a file, the default one first.

    Raises:
        ConfigError: the file cannot be read, is no list of models, or has none or two of one name.
    """
    try:
        models = msgspec.json.decode(disk.read_bytes(path), type=list[ModelEntry])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no list of models: {error}") from None
    check_models(models)
    return models


def write_models(path: Path, models: Sequence[ModelEntry]) -> None:
    """Write the file. A reader sees the old list or the new one.

    Raises:
        ConfigError: there is no model, or two have one name.
        OSError: the file cannot be written.
    """
    check_models(models)
    disk.replace(path, msgspec.json.format(msgspec.json.encode(list(models)), indent=2))


def check_models(models: Sequence[ModelEntry]) -> None:
    """Raise ConfigError for a list without a model, an empty name, or two models of one name.

    A name and an alias are both names.
    """
    if not models:
        raise ConfigError("the list of models is empty: name at least one")
    owners: dict[str, int] = {}
    for number, model in enumerate(models):
        for name in (model.name, *model.aliases):
            if not name:
                raise ConfigError(f"model {model.name!r} has an empty name or alias")
            if owners.setdefault(name, number) != number:
                raise ConfigError(
                    f"two models are called {name!r}: give one of them another name or alias"
                )
