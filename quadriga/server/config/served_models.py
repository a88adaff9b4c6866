"""The models of a server: by --model, which may be repeated, --models FILE and --models-dir DIR.

Each model has a config of its own, of which every flag of the server that is not the model's is the
same in all. What two models cannot share, such as the endpoint and the journal, is made different.
"""

import dataclasses
import os
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.errors import ConfigError
from quadriga.keywords import similar
from quadriga.server.config import server_config
from quadriga.server.config.flags import checked_value, converted, flag_fields, flag_name
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.client import PRIVATE_ENDPOINT
from quadriga.wire.sockets import IPC

# Groups of flags that a model may have of its own, but for these, which are the server's.
MODEL_GROUPS = ("model", "scheduler", "worker", "detok", "replicas")
SERVER_FLAGS = {
    "models", "models_dir", "served_model_name", "journal", "resume", "no_journal", "kv_cache_dir",
    "fair_tenants",
}  # fmt: skip
FRONTEND_FLAGS = {
    "tokenize_workers", "default_max_tokens", "allow_auto_truncate", "sampling_defaults",
    "tool_call_parser", "reasoning_parser", "pooling", "queue_timeout", "request_timeout",
}  # fmt: skip
_MODELS = "models, such as `chat: {model: smollm2-135m, max-batch-size: 16}`"
# Characters of a directory's name; others of a model's name become "-".
_NO_NAME = re.compile(r"[^\w.-]+", re.ASCII)
MAX_PORT = 65535
# Of a folder in --models-dir that is a model; of files, the names of a model in several parts.
FILES_OF_A_MODEL = ("config.json", "modules.json")
GGUF = ".gguf"
_PART = re.compile(r"-(\d+)-of-\d+\.gguf$", re.ASCII)


class ConfiguredModel(NamedTuple):
    """A model that is to be served.

    Attributes:
        name: what clients call it.
        aliases: other names for it.
        config: its flags.
        preload: whether the server loads it at the start; None: if there is room.
        pin: it is never unloaded to make room for others.
        idle_unload: seconds without a request after which it is unloaded; None: never.
        is_found: it was found in --models-dir: the others are served also where it cannot be.
    """

    name: str
    aliases: list[str]
    config: ServerConfig
    preload: bool | None = None
    pin: bool = False
    idle_unload: float | None = None
    is_found: bool = False


class ModelSet(NamedTuple):
    """The models of a server.

    Attributes:
        shared: the flags of the server, which are those of the gateway.
        models: the models, the default one first.
    """

    shared: ServerConfig
    models: list[ConfiguredModel]


def from_namespace(namespace: Namespace) -> ModelSet:
    """Return the models of a parsed command line.

    Raises:
        ConfigError: a flag cannot work, or two models have one name.
    """
    config = server_config.from_namespace(namespace)
    names = server_config.named_models(namespace)
    is_set = config.model.models or config.model.models_dir or len(names) > 1
    if config.model.served_model_name and is_set:
        raise ConfigError(
            f"--served-model-name {config.model.served_model_name} is the name of one model: give"
            " names in a file, with --models FILE"
        )
    found = _in_directory(config.model.models_dir)
    if config.model.models:
        if names:
            raise ConfigError(
                f"--models {config.model.models} says which models are served: leave --model"
                f" {names[0]} out, or put it into the file"
            )
        models = _of_file(config, found)
    elif names or found:
        models = [_of_name(config, found.get(name, name)) for name in names]
    else:
        models = [_model(config, "", [], {})]
    models += _others(config, found, models)
    _check_names(models)
    _check_kv_events(models)
    if len(models) == 1:
        return ModelSet(models[0].config, models)
    shared = models[0].config
    return ModelSet(shared, [_apart(model, number) for number, model in enumerate(models)])


def _of_name(config: ServerConfig, name: str) -> ConfiguredModel:
    return _model(config, config.model.served_model_name, [], {"model": name})


def _in_directory(directory: str) -> dict[str, str]:
    """Return the paths of the models in --models-dir by their names, in their order; "": none.

    Raises:
        ConfigError: there is no such directory, or no model in it.
    """
    if not directory:
        return {}
    try:
        paths = sorted(Path(directory).expanduser().absolute().iterdir())
    except OSError as error:
        raise ConfigError(f"--models-dir {directory} cannot be read: {error.strerror}") from None
    found = {path.name: str(path) for path in paths if _is_model(path)}
    if not found:
        raise ConfigError(
            f"--models-dir {directory} has no model: no folder with a config.json or modules.json,"
            " and no .gguf"
        )
    return found


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).is_file() for name in FILES_OF_A_MODEL)
    part = _PART.search(path.name)  # the first part of a split model stands for all
    return path.suffix == GGUF and (part is None or int(part[1]) == 1)


def _others(
    config: ServerConfig, found: Mapping[str, str], models: Sequence[ConfiguredModel]
) -> list[ConfiguredModel]:
    """Return the models that were found and are not among those that were named.

    Args:
        config: the flags of the server.
        found: as `_in_directory` returns it.
        models: those that were named; where there are none, the first that was found is loaded.
    """
    named = {os.path.realpath(os.path.expanduser(model.config.model.model)) for model in models}
    names = {model.name for model in models}
    others: list[ConfiguredModel] = []
    for name, path in found.items():
        if os.path.realpath(path) in named or name in names:
            continue
        preload = None if not models and not others else False
        other = _model(config, name, [], {"model": path})
        others.append(other._replace(preload=preload, is_found=True))
    return others


def _of_file(config: ServerConfig, found: Mapping[str, str]) -> list[ConfiguredModel]:
    """Return the models of --models: a map of names to flags, without their dashes.

    `found`: the paths of names that are those of a model of --models-dir.
    """
    path = Path(config.model.models)
    entries = server_config.read_map("--models", path, _MODELS)
    if not entries:
        raise ConfigError(f"{path} is empty: it must be a map of {_MODELS}")
    return [_entry(config, path, name, entry, found) for name, entry in entries.items()]


def _entry(
    config: ServerConfig, path: Path, name: object, entry: object, found: Mapping[str, str]
) -> ConfiguredModel:
    if entry is None:
        entry = {}
    if not isinstance(entry, dict) or not isinstance(name, str):
        raise ConfigError(
            f"{path}: {name!r} is no model's name with a map of its flags: the file is a map of"
            f" {_MODELS}"
        )
    where = f"{path}: {name}"
    aliases = entry.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ConfigError(f"{where}: aliases is {aliases!r}: it must be a list of names")
    preload = converted(f"{where}: preload", entry.pop("preload", None), bool | None)
    pin = converted(f"{where}: pin", entry.pop("pin", False), bool)
    idle_unload = config.launch.sleep_idle_seconds
    for key in ("idle_unload", "idle-unload"):
        idle_unload = converted(f"{where}: {key}", entry.pop(key, idle_unload), float | None)
    flags = {"model": found.get(name, name)} | _flags(where, entry)
    model = _model(config, name, aliases, flags)
    return model._replace(preload=preload, pin=pin, idle_unload=idle_unload)


def _flags(where: str, entry: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the flags of a model by the names of their fields. Raise ConfigError."""
    fields = _model_fields()
    flags = {}
    for key, value in entry.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            every = {field.name for field in flag_fields(*ServerConfig().groups())}
            if name in every:
                raise ConfigError(
                    f"{where}: {key} is a flag of the whole server: give it on the command line, or"
                    " in the file of --config"
                )
            near = [flag_name(other)[2:] for other in similar(name, fields)]
            advice = f"; near it: {', '.join(near)}" if near else ""
            raise ConfigError(f"{where}: a model has no flag {key!r}{advice}")
        flags[name] = checked_value(f"{where}: {key}", value, fields[name])
    return flags


def _model_fields() -> "dict[str, dataclasses.Field[Any]]":
    """Return the flags that a model may have of its own."""
    config = ServerConfig()
    groups = [getattr(config, name) for name in MODEL_GROUPS]
    fields = {field.name: field for field in flag_fields(*groups)}
    fields |= {f.name: f for f in flag_fields(config.frontend) if f.name in FRONTEND_FLAGS}
    return {name: field for name, field in fields.items() if name not in SERVER_FLAGS}


def _model(
    config: ServerConfig, name: str, aliases: list[str], flags: dict[str, Any]
) -> ConfiguredModel:
    own = config.replace(models="", models_dir="", served_model_name=name, **flags)
    own.validate()
    idle_unload = config.launch.sleep_idle_seconds
    return ConfiguredModel(own.model.shown_name, aliases, own, idle_unload=idle_unload)


def _check_names(models: list[ConfiguredModel]) -> None:
    """Raise ConfigError for a name that two models have, or that no request could have."""
    seen: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if not name.isprintable() or name.split() != [name]:
                raise ConfigError(f"a model is called {name!r}: give it a name without blanks")
            if name in seen:
                raise ConfigError(
                    f"two models are called {name!r}, {seen[name]} and {model.config.model.model}:"
                    " give one of them another name in a file, with --models FILE"
                )
            seen[name] = model.config.model.model
    directories: dict[str, str] = {}
    for model in models:
        other = directories.setdefault(_directory(model.name), model.name)
        if other != model.name:
            raise ConfigError(
                f"models {other!r} and {model.name!r} would have one directory,"
                f" {_directory(other)}: give one of them another name in a file, with --models FILE"
            )


def _check_kv_events(models: list[ConfiguredModel]) -> None:
    """Raise ConfigError for an endpoint of --kv-events-config that two models have."""
    seen: dict[str, str] = {}
    for model in models:
        replicas, events = model.config.replicas, model.config.scheduler.kv_events
        if not events.is_on:
            continue
        for number in range(replicas.num_slots):
            of_replica = events.of_replica(number)
            for endpoint in (of_replica.endpoint, of_replica.replay_endpoint):
                if endpoint is not None and seen.setdefault(endpoint, model.name) != model.name:
                    raise ConfigError(
                        f"models {seen[endpoint]!r} and {model.name!r} would publish KV events at"
                        f" {endpoint}: give each its own kv-events-config in a file, with"
                        " --models FILE"
                    )


def _directory(name: str) -> str:
    """Return the name of a model's directories."""
    return _NO_NAME.sub("-", name)


def without(left_out: Sequence[ConfiguredModel], model_set: ModelSet) -> list[ConfiguredModel]:
    """Return the models but for some: the next ones have their endpoints, and their preload."""
    endpoint = model_set.shared.frontend.endpoint
    models = [model for model in model_set.models if model not in left_out]
    if model_set.models[0] in left_out:
        models[0] = models[0]._replace(preload=model_set.models[0].preload)
    return [
        model._replace(
            config=model.config.replace(
                endpoint=_endpoint(endpoint, _directory(model.name), number)
            )
        )
        for number, model in enumerate(models)
    ]


def _apart(model: ConfiguredModel, number: int) -> ConfiguredModel:
    """Return a model of several with what it cannot share with the others.

    Args:
        model: the model.
        number: its number, from 0 on.
    """
    config, directory = model.config, _directory(model.name)
    changes: dict[str, Any] = {"endpoint": _endpoint(config.frontend.endpoint, directory, number)}
    if config.scheduler.journal:
        changes["journal"] = str(Path(config.scheduler.journal) / directory)
    if config.worker.kv_cache_dir:
        changes["kv_cache_dir"] = str(Path(config.worker.kv_cache_dir) / directory)
    return model._replace(config=config.replace(**changes))


def _endpoint(endpoint: str, directory: str, number: int) -> str:
    """Return the endpoint of a model: that of the server for the first, the next port for others.

    Raises:
        ConfigError: there is no such port.
    """
    if number == 0 or endpoint == PRIVATE_ENDPOINT:
        return endpoint
    if endpoint.startswith(IPC):
        return f"{endpoint}.{directory}"
    host, _, port = endpoint.rpartition(":")
    if int(port) + number > MAX_PORT:
        raise ConfigError(
            f"endpoint is {endpoint}, and model {number + 1} needs port {int(port) + number}:"
            f" choose one up to {MAX_PORT - number}"
        )
    return f"{host}:{int(port) + number}"
