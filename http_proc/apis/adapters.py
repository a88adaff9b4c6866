"""LoRA adapters: load, unload and list them, as vLLM, SGLang and llama.cpp do."""

import asyncio
import logging

import msgspec
from aiohttp import web

from http_proc.apis.model_states import check_operator
from http_proc.core.errors import ApiError, from_server, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.observe import CallRecord
from http_proc.core.served_model import ServedModel
from http_proc.generation.sampling import convert
from http_proc.generation.schema import AdapterScale, RequestBody
from http_proc.web.endpoint import PLAIN, Endpoint, post
from http_proc.web.exchange import GATEWAY, RECORD, json_response, read_object
from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.sampling.params import SamplingParams
from quadriga.server.models.adapters.store import AdapterEntry, AdapterStore

# The library's names of the fields, in errors.
NAMES = {"adapter": "lora_name"}


class LoadAdapterBody(RequestBody):
    """POST /v1/load_lora_adapter.

    lora_name: a model's name in requests from now on. lora_path: a PEFT directory, or a GGUF file.
    load_inplace: it replaces the adapter of this name; requests that have begun keep theirs.
    base_model_name: the model that it belongs to, of a server with several. pinned: it keeps its
    place in the worker while no request needs it; left out: as the adapter of this name does.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    pinned: bool | None = None


class UnloadAdapterBody(RequestBody):
    """POST /v1/unload_lora_adapter. Requests that have begun go on; it is not pinned any more."""

    lora_name: str


class LoadedAdapters(msgspec.Struct):
    """The adapters by name, with the paths that they were loaded from, in SGLang's form."""

    success: bool
    loaded_adapters: dict[str, str]


class NumberedAdapter(msgspec.Struct):
    """An adapter in llama.cpp's form.

    scale: 0, as only requests that name it have it. pinned: it keeps its place in the worker.
    """

    id: int
    path: str
    name: str
    scale: float = 0.0
    pinned: bool = False


def all_entries(gateway: Gateway) -> list[tuple[ServedModel, AdapterEntry]]:
    """Return the loaded adapters of all models."""
    return [
        (model, entry)
        for model in gateway.models
        if model.adapters is not None
        for entry in model.adapters.entries.values()
    ]


def served_by(
    gateway: Gateway,
    model: str | None,
    lora: list[AdapterScale],
    lora_path: str | None,
    record: CallRecord,
) -> ServedModel:
    """Return what answers a request: a model, or an adapter by one of its names.

    Args:
        gateway: its state.
        model: a name; None: the default model.
        lora: at most one adapter of scale 1, by number, as llama.cpp's requests have it.
        lora_path: the name of an adapter, as SGLang's requests have it.
        record: as in Gateway.served.

    Raises:
        ApiError: there is no such model or adapter, or there would be several adapters.
    """
    chosen = [one for one in lora if one.scale != 0]
    if not chosen:
        return gateway.served(lora_path or model, record)
    entries = all_entries(gateway)
    if len(chosen) > 1 or chosen[0].scale != 1 or not 0 <= chosen[0].id < len(entries):
        raise invalid(
            f"lora is {[[one.id, one.scale] for one in lora]}: one adapter of scale 1 can answer,"
            f" of the {len(entries)} that GET /lora-adapters lists",
            "lora",
        )
    return gateway.served(entries[chosen[0].id][1].name, record)


async def load(request: web.Request) -> web.Response:
    """Load an adapter."""
    entry = await _load(request)
    return _answer(request, f"Success: LoRA adapter '{entry.name}' added successfully.")


async def unload(request: web.Request) -> web.Response:
    """Unload an adapter."""
    name = await _unload(request)
    return _answer(request, f"Success: LoRA adapter '{name}' removed successfully.")


def _answer(request: web.Request, text: str) -> web.Response:
    """Return an answer in the form of the path: a text as vLLM's, or a list as SGLang's."""
    if request.path.startswith("/v1/"):
        return web.Response(text=text)
    entries = all_entries(request.app[GATEWAY])
    return json_response(LoadedAdapters(True, {entry.name: entry.path for _, entry in entries}))


async def numbered(request: web.Request) -> web.Response:
    """List the adapters with the numbers that `lora` of a request may have."""
    entries = all_entries(request.app[GATEWAY])
    return json_response(
        [
            NumberedAdapter(i, entry.path, entry.name, pinned=entry.pinned)
            for i, (_, entry) in enumerate(entries)
        ]
    )


async def _load(request: web.Request) -> AdapterEntry:
    check_operator()
    gateway = request.app[GATEWAY]
    body = convert(await read_object(request), LoadAdapterBody)
    model = gateway.served(body.base_model_name, request[RECORD]).base
    store = _store(model)
    if not model.config.model.enable_lora:
        raise ApiError(
            403,
            "clients load no adapters from paths here: start the server with --enable-lora, or name"
            " the adapter with --lora-modules NAME=PATH",
            code="not_allowed",
        )
    served = gateway.models.find(body.lora_name)
    if served is not None and served.adapter == "":
        raise ApiError(
            400,
            f"lora_name is {body.lora_name!r}, which is a model's name: choose another one",
            param="lora_name",
        )
    name, before = body.lora_name, store.entries.get(body.lora_name)
    try:
        entry = await asyncio.to_thread(
            store.load, name, body.lora_path, body.load_inplace, body.pinned
        )
        await _use(model, name)
    except QuadrigaError as error:
        await asyncio.to_thread(store.put_back, name, before)
        raise from_server(error, NAMES) from None
    return entry


async def _use(model: ServedModel, name: str) -> None:
    """Have the worker load an adapter, which says whether it fits the model. Raise InvalidRequest.

    Other errors, such as that of a full queue, say nothing about the adapter.
    """
    info = await model.server_info.static()
    try:
        if info["encoder"]:
            await model.client.embed("", adapter=name)
        else:
            params = SamplingParams(max_new_tokens=1)
            await model.client.generate([0], params, adapter=name)
    except InvalidRequest as error:
        if error.field == "adapter":
            raise
    except QuadrigaError as error:
        logging.warning("adapter %s is loaded at its first request: %s", name, error)


async def _unload(request: web.Request) -> str:
    check_operator()
    gateway = request.app[GATEWAY]
    body = convert(await read_object(request), UnloadAdapterBody)
    for model, entry in all_entries(gateway):
        if entry.name == body.lora_name:
            await asyncio.to_thread(_store(model).unload, entry.name)
            return entry.name
    names = [entry.name for _, entry in all_entries(gateway)]
    raise ApiError(
        404,
        f"lora_name is {body.lora_name!r}, which is not loaded: loaded are {names[:5]}",
        param="lora_name",
        code="model_not_found",
    )


def _store(model: ServedModel) -> AdapterStore:
    if model.adapters is None:
        raise ApiError(
            400,
            f"model {model.name!r} serves no adapters: start the server with --enable-lora,"
            " --lora-modules NAME=PATH or --lora-dir DIR",
        )
    return model.adapters


ADAPTER_ENDPOINTS = [
    post("/v1/load_lora_adapter", load, "Load a LoRA adapter", LoadAdapterBody, PLAIN),
    post("/v1/unload_lora_adapter", unload, "Unload a LoRA adapter", UnloadAdapterBody, PLAIN),
    post("/load_lora_adapter", load, "Load a LoRA adapter, in SGLang's format",
         LoadAdapterBody, LoadedAdapters),
    post("/unload_lora_adapter", unload, "Unload a LoRA adapter, in SGLang's format",
         UnloadAdapterBody, LoadedAdapters),
    Endpoint("/lora-adapters", numbered, "The LoRA adapters, in llama.cpp's format",
             list[NumberedAdapter]),
]  # fmt: skip
