"""Move a name from one model to another, whole or for a share of the requests."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web

from http_proc.apis.model_states import MODEL_STATES, check_operator
from http_proc.core.errors import ApiError, invalid
from http_proc.core.gateway import Gateway, Key
from http_proc.core.served_model import LOST, ServedModel, ServedModels
from http_proc.generation.sampling import convert
from http_proc.generation.schema import RequestBody
from http_proc.web.endpoint import Endpoint, post
from http_proc.web.exchange import GATEWAY, json_response, read_object
from quadriga.errors import ConfigError
from quadriga.server.model_aliases import (
    FILE_NAME,
    MAX_ALIAS_CHARS,
    Alias,
    read_aliases,
    write_aliases,
)


class AliasBody(RequestBody):
    """POST /models/alias.

    model: the own name of the model that the alias is to have. canary: the share of the requests
    that it gets, above 0; 1, or without it: all. 0 takes a canary back.
    """

    alias: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ALIAS_CHARS)]
    model: str
    canary: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class AliasAnswer(msgspec.Struct):
    """The models that an alias has now. canary_model, canary: of the share, if there is one."""

    alias: str
    model: str
    canary_model: str | msgspec.UnsetType = msgspec.UNSET
    canary: float | msgspec.UnsetType = msgspec.UNSET


class AliasMoves:
    """Moves aliases one after the other, each once it is on the disk.

    Args:
        models: what is served.
        run_dir: directory of the server's run, which has the file; None: there is no file.
    """

    def __init__(self, models: ServedModels, run_dir: Path | None) -> None:
        self._models = models
        self._path = None if run_dir is None else run_dir / FILE_NAME
        self._moved: dict[str, Alias] = {}
        self._lock = asyncio.Lock()

    def open(self) -> None:
        """Move the aliases that the gateway before this one had moved."""
        if self._path is None:
            return
        try:
            aliases = read_aliases(self._path)
        except ConfigError as error:
            logging.error("aliases are those of the start again: %s", error)
            return
        for alias in aliases:
            self._moved[alias.name] = alias
            self._models.move(alias)

    async def move(self, body: AliasBody) -> Alias:
        """Move an alias. Requests that have begun stay at their model.

        Raises:
            ApiError: the alias cannot be moved so, or the file cannot be written.
        """
        async with self._lock:
            alias = self._alias(body)
            moved = self._moved | {alias.name: alias}
            if self._path is not None:
                try:
                    await asyncio.to_thread(write_aliases, self._path, moved.values())
                except OSError as error:
                    raise ApiError(
                        503,
                        f"alias {alias.name!r} was not moved, since {self._path} cannot be"
                        f" written: {error.strerror}; free space there, and try again",
                        code="alias_not_kept",
                    ) from None
            self._moved = moved
            self._models.move(alias)
        logging.info("alias %s is of %s", alias.name, _described(alias))
        return alias

    def _alias(self, body: AliasBody) -> Alias:
        """Return the alias as it will be. Raise ApiError."""
        name, models = body.alias, self._models
        if not name.isprintable() or name.split() != [name]:
            raise invalid(f"alias is {name!r}: give it a name without blanks", "alias")
        if models.named(name) is not None:
            raise invalid(
                f"alias is {name!r}, which is a model's own name: choose another name", "alias"
            )
        model = self._servable(body.model)
        before = models.alias(name)
        if body.canary == 1:
            return Alias(name=name, model=model.name)
        if before is None:
            raise invalid(
                f"canary is {body.canary:g}, and alias {name!r} has no model for the other"
                " requests: leave canary out",
                "canary",
            )
        if body.canary == 0:
            return Alias(name=name, model=before.model)
        if before.model == model.name:
            raise invalid(
                f"canary is {body.canary:g}, and alias {name!r} is of {model.name!r} already: name"
                " another model, or send canary 0 to end a canary",
                "canary",
            )
        return Alias(name=name, model=before.model, canary_model=model.name, canary=body.canary)

    def _servable(self, name: str) -> ServedModel:
        """Return a model by its own name. Raise ApiError."""
        model = self._models.named(name)
        if model is None:
            alias = self._models.alias(name)
            if alias is not None:
                raise invalid(
                    f"model is {name!r}, which is an alias: use the model's own name,"
                    f" {alias.model!r}",
                    "model",
                )
            raise self._models.missing(name)
        if model.state == LOST:
            raise ApiError(
                409,
                f"model {name!r} has ended for good: choose another one, or restart the server",
                param="model",
                code="model_lost",
            )
        return model


def _described(alias: Alias) -> str:
    if not alias.canary:
        return alias.model
    return f"{alias.model}, and for {alias.canary:.1%} of the requests {alias.canary_model}"


ALIAS_MOVES = Key[AliasMoves]("alias_moves")


def open_aliases(gateway: Gateway) -> None:
    """Let aliases of this gateway be moved, and move those that were."""
    moves = gateway[ALIAS_MOVES] = AliasMoves(gateway.models, gateway.run_dir)
    moves.open()


async def move_alias(request: web.Request) -> web.Response:
    """Move an alias."""
    check_operator()
    gateway = request.app[GATEWAY]
    alias = await gateway[ALIAS_MOVES].move(convert(await read_object(request), AliasBody))
    if (states := gateway.get(MODEL_STATES)) is not None:
        states.note_change()
    answer = AliasAnswer(alias.name, alias.model)
    if alias.canary:
        answer.canary_model, answer.canary = alias.canary_model, alias.canary
    return json_response(answer)


ALIAS_ENDPOINTS: list[Endpoint] = [
    post("/models/alias", move_alias, "Move a name to another model", AliasBody, AliasAnswer)
]
