"""The models and whether they are loaded, as llama.cpp's router lists them; load and unload."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from aiohttp import web

from http_proc.core.caller import current_caller
from http_proc.core.errors import RETRY_AFTER_RESTART_S, ApiError
from http_proc.core.gateway import Gateway, Key
from http_proc.core.served_model import FAILED, LOADED, LOST, ServedModel, ServedModels
from http_proc.generation.sampling import convert
from http_proc.generation.schema import RequestBody
from http_proc.web.endpoint import STREAM, Endpoint, post
from http_proc.web.exchange import GATEWAY, HEADERS, RECORD, json_response, read_object
from quadriga.server.model_list import ModelLoad

UNLOADED = "unloaded"
# Time in which the launcher unloads a model that is not busy.
UNLOAD_TIMEOUT_S = 60.0
# A model that is busy is asked about at this interval, where the request waits for it.
BUSY_POLL_S = 0.2
MAX_WAIT_S = 3600.0
INFO_MAX_AGE_S = 0.0


class ModelBody(RequestBody):
    """POST /models/load and /models/unload. model: its name, or an alias."""

    model: str


class ModelStatus(msgspec.Struct):
    """value: loaded, loading, unloading, unloaded, failed, or lost until the server's restart."""

    value: str


class RoutedModel(msgspec.Struct):
    """A model, as llama.cpp's router shows it.

    canaries: shares of the requests that it gets of other models' aliases, by their names.
    """

    id: str
    status: ModelStatus
    aliases: list[str]
    object: str = "model"
    owned_by: str = "quadriga"
    canaries: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


class RoutedModels(msgspec.Struct):
    """All models, the default one first."""

    data: list[RoutedModel]
    object: str = "list"


class LoadAnswer(msgspec.Struct):
    """success: the model is loaded as soon as there is room, or is unloaded."""

    success: bool = True


class ModelStates:
    """Wishes of clients to load and unload models, and the changes that follow.

    Args:
        wish: reports to the launcher what is wanted of a model, as ModelWish.
    """

    def __init__(self, wish: Callable[..., None]) -> None:
        self._wish = wish
        self._changed = asyncio.Event()

    def load(self, model: ServedModel) -> None:
        """Ask for a model to be loaded."""
        self._wish(name=model.name, loaded=True)

    def unload(self, model: ServedModel) -> None:
        """Ask for a model to be unloaded, which happens if it is not busy."""
        self._wish(name=model.name, loaded=False)

    def keep(self, model: ServedModel, seconds: float) -> None:
        """Ask for a model to be unloaded after so many seconds without a request; below 0: never.

        It begins to count now.
        """
        self._wish(name=model.name, idle_s=seconds)

    async def until_loaded(self, model: ServedModel) -> None:
        """Ask for a model to be loaded, and wait for that.

        Raises:
            ApiError: it cannot be loaded.
        """
        if model.state == LOADED:
            return
        self.load(model)
        while model.state != LOADED:
            await self.change()
            if model.state in (FAILED, LOST):
                raise ApiError(
                    503,
                    f"model {model.name!r} could not be loaded: the log says why",
                    code="server_failed",
                    retry_after=RETRY_AFTER_RESTART_S,
                )

    def note_change(self) -> None:
        """Take in that the state of some model has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()


MODEL_STATES = Key[ModelStates]("model_states")


def set_states(gateway: Gateway, states: str) -> None:
    """Take in the states of models that the launcher has sent, as JSON."""
    loads = msgspec.json.decode(states, type=dict[str, ModelLoad])
    only = loads.get("")  # a server's only model is not called by its name there
    for model in gateway.models:
        model.load = only or loads.get(model.name, model.load)
    gateway[MODEL_STATES].note_change()


async def list_models(request: web.Request) -> web.Response:
    """List the models with their states."""
    gateway = request.app[GATEWAY]
    return json_response(_listed(gateway.models))


def _listed(models: ServedModels) -> RoutedModels:
    return RoutedModels(
        [
            RoutedModel(
                model.name,
                ModelStatus(model.state),
                models.aliases_of(model),
                canaries=models.canaries_of(model) or msgspec.UNSET,
            )
            for model in models
        ]
    )


async def load(request: web.Request) -> web.Response:
    """Load a model as soon as there is room."""
    gateway, model = await _named(request)
    if model.state != LOADED:
        gateway[MODEL_STATES].load(model)
    return json_response(LoadAnswer())


async def unload(request: web.Request) -> web.Response:
    """Unload a model that is not busy; with `wait` in the query, as soon as it is not."""
    wait_s = _wait_s(request)
    gateway, model = await _named(request)
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + wait_s
    while (num_open := await _num_open(model)) and loop.time() < ends_at:
        await asyncio.sleep(BUSY_POLL_S)
    if num_open:
        raise ApiError(
            409,
            f"model {model.name!r} has {num_open} open requests: wait for their end, with"
            " ?wait=SECONDS",
            code="model_busy",
        )
    if model.state == LOADED:
        gateway[MODEL_STATES].unload(model)
        try:
            await asyncio.wait_for(_until_unloaded(gateway, model), UNLOAD_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(
                409,
                f"model {model.name!r} was not unloaded within {UNLOAD_TIMEOUT_S:g} s: it has got"
                " requests meanwhile; try again, with ?wait=SECONDS",
                code="model_busy",
            ) from None
    return json_response(LoadAnswer())


async def _until_unloaded(gateway: Gateway, model: ServedModel) -> None:
    while model.state != UNLOADED:
        await gateway[MODEL_STATES].change()


async def _num_open(model: ServedModel) -> int:
    info = await model.server_info.current(INFO_MAX_AGE_S)
    return int(info["open_requests"])


def _wait_s(request: web.Request) -> float:
    text = request.query.get("wait", "0")
    if not (text.isascii() and text.isdigit() and int(text[:20]) <= MAX_WAIT_S):
        raise ApiError(400, f"wait is {text[:100]!r}: it must be from 0 to {MAX_WAIT_S:g} seconds")
    return float(text)


def check_operator() -> None:
    """Raise ApiError for a tenant's key."""
    if current_caller().entry is not None:
        raise ApiError(
            403,
            "models are those of all tenants: load, unload and name them with a key of --api-key",
            code="not_allowed",
        )


async def _named(request: web.Request) -> tuple[Gateway, ServedModel]:
    """Return the model of a request's body. Raise ApiError for a tenant's key."""
    check_operator()
    gateway = request.app[GATEWAY]
    body = convert(await read_object(request), ModelBody)
    return gateway, gateway.served(body.model, request[RECORD])


async def events(request: web.Request) -> web.StreamResponse:
    """Send the list of models, and again whenever a state has changed."""
    gateway = request.app[GATEWAY]
    response = web.StreamResponse(headers=HEADERS | {"Content-Type": STREAM})
    await response.prepare(request)
    async for event in _events(gateway):
        await response.write(event)
    return response


async def _events(gateway: Gateway) -> AsyncIterator[bytes]:
    while not gateway.is_draining:
        changed = asyncio.ensure_future(gateway[MODEL_STATES].change())
        yield b"data: " + msgspec.json.encode(_listed(gateway.models)) + b"\n\n"
        await changed


MODEL_STATE_ENDPOINTS = [
    Endpoint("/models", list_models, "The models, and whether they are loaded", RoutedModels),
    Endpoint("/models/sse", events, "The same, and again whenever it changes", STREAM),
    post("/models/load", load, "Load a model", ModelBody, LoadAnswer),
    post("/models/unload", unload, "Unload a model", ModelBody, LoadAnswer),
]
