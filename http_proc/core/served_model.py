"""The models that are served: of each its name, its clients, its info, and what waits for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from http_proc.core.call import Call
from http_proc.core.errors import ApiError
from http_proc.core.observe import AnswerMetrics, RecentChoices
from http_proc.core.progress import ProgressPoller
from quadriga.client.async_client import AsyncClient
from quadriga.errors import QuadrigaError
from quadriga.keywords import similar
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.model_aliases import Alias
from quadriga.server.model_list import ModelLoad
from quadriga.server.models.adapters.store import AdapterStore

INFO_TIMEOUT_S = 2.0
# States of a model in which its requests run, and in which they soon will.
LOADED, LOADING = "loaded", "loading"
FAILED, LOST = "failed", "lost"
# Probes within this time share one question to the server.
READY_MAX_AGE_S = 0.5
READY_POLL_S = 0.02
# An error names all models up to this number, and those with similar names beyond it.
MAX_NAMED_MODELS = 5
MAX_COMPARED_CHARS = 200

T = TypeVar("T")


class ServerInfo:
    """Asks the server for its gauges, counters and constants, and keeps the last answer.

    Args:
        client: the client of the server.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._static: dict[str, Any] = {}
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._asked_at = 0.0

    def forget(self) -> None:
        """Take in that what is known holds no more."""
        self._static, self._task = {}, None

    async def static(self) -> dict[str, Any]:
        """Return an info whose constants are valid, such as the context length.

        Raises:
            QuadrigaError: as `current`.
        """
        if not self._static.get("ready"):
            self._static = await self.current()
        return self._static

    async def current(self, max_age_s: float = 0.0) -> dict[str, Any]:
        """Return an info that is at most `max_age_s` old. Concurrent callers share one question.

        An answer that does not say "ready" is never used again.

        Raises:
            QuadrigaError: the server has failed, or does not answer in INFO_TIMEOUT_S.
        """
        now = time.monotonic()
        task = self._task
        if task is None or (
            task.done() and (now - self._asked_at > max_age_s or not _says_ready(task))
        ):
            self._asked_at = now
            task = self._task = asyncio.create_task(self._client.info(INFO_TIMEOUT_S))
            task.add_done_callback(_retrieve_exception)
        return await asyncio.shield(task)


def _says_ready(task: "asyncio.Task[dict[str, Any]]") -> bool:
    return not task.cancelled() and task.exception() is None and bool(task.result()["ready"])


def _retrieve_exception(task: "asyncio.Task[dict[str, Any]]") -> None:
    """Keep asyncio from logging an exception that no caller waits for."""
    if not task.cancelled():
        task.exception()


class ResponseHead(NamedTuple):
    """The fields at the top of every body and chunk. `created` is in Unix seconds."""

    id: str
    created: int
    model: str

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of a chunk of a stream. `kind`: its field "object"."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def wall_seconds() -> int:
    """Return the wall clock's time in Unix seconds, for the field `created` of answers."""
    return int(time.time())


class ServedModel:
    """One of the models, behind a public socket of its own.

    Args:
        config: the flags of the model's server.
        client: its client, which must be connected before the first request arrives.
        lasting_client: the client for resumable requests, whose address is that of the gateways
            before and after this one; None: `client` is.
        ping_interval_s: seconds of silence after which a stream gets a comment; 0: never.
        name: what clients see; "": the name of `config`.
        aliases: further names of the model in requests, until they are moved.
        preload: the server is ready when the model is loaded; else a request loads it.

    Attributes:
        first_aliases: its aliases at the start; ServedModels has those of now.
        load: whether it is loaded. LOST: its processes have ended for good, and every call of its
            clients says why.
        server_info: the info of the model's server.
        progress: the poller of streams that wait.
        lasting_progress: the poller of resumable ones.
        answers: counts and times of its answers.
        recent: what is known of its choices that have ended lately.
        adapters: what requests may name of its adapters; None: it serves none.
    """

    def __init__(
        self,
        config: ServerConfig,
        client: AsyncClient,
        lasting_client: AsyncClient | None = None,
        *,
        ping_interval_s: float,
        name: str = "",
        aliases: Sequence[str] = (),
        preload: bool = True,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.config = config
        self.name = name or config.model.shown_name
        self.first_aliases = tuple(aliases)
        self.preload = preload
        self.adapters = adapters
        self._load = ModelLoad(LOADED)
        self.client = client
        self.lasting_client = lasting_client or client
        self.server_info = ServerInfo(client)
        self.progress = ProgressPoller(client, ping_interval_s, self._waiting_note)
        self.lasting_progress = ProgressPoller(
            self.lasting_client, ping_interval_s, self._waiting_note
        )
        self.answers = AnswerMetrics()
        self.recent = RecentChoices()

    @property
    def base(self) -> "ServedModel":
        """The model that has weights of its own."""
        return self

    @property
    def adapter(self) -> str:
        """Name of the adapter that answers; "": the model itself does."""
        return ""

    @property
    def load(self) -> ModelLoad:
        """Whether it is loaded, as the launcher says. Only that of a base can be set."""
        return self.base._load

    @load.setter
    def load(self, load: ModelLoad) -> None:
        self._load = load

    @property
    def state(self) -> str:
        """Whether it is loaded: the state of `load`."""
        return self.load.state

    def _waiting_note(self) -> str:
        """Return what a stream's comments say of the model: that it waits, or is being loaded."""
        if self.state == LOADED:
            return ""
        return f"loading {self.name}" if self.state == LOADING else f"waiting for {self.name}"

    def is_called(self, name: str) -> bool:
        """Return whether the model is called so: by its name, or its path."""
        return name == self.name or self.config.model.is_called(name)

    def head(self, call: Call, prefix: str, separator: str = "-") -> ResponseHead:
        """Return the head of the answer, whose id is made of `prefix` and the X-Request-Id."""
        answer_id = call.record.id = f"{prefix}{separator}{call.request_id}"
        created = wall_seconds() if call.resumption is None else call.resumption.created
        return ResponseHead(answer_id, created, self.name)

    async def lose(self, error: QuadrigaError) -> None:
        """End every open and later request with an error: the model's processes have ended."""
        self.load = ModelLoad(LOST)
        self.server_info.forget()
        await self.client.give_up(error)
        if self.lasting_client is not self.client:
            await self.lasting_client.give_up(error)

    async def until_ready(self) -> None:
        """Wait until the model's server is connected and has reported that it can serve.

        Nothing is waited for where the model is lost.
        """
        while self.state != LOST:
            with suppress(QuadrigaError):
                await self.lasting_client.connect()
                if (await self.server_info.static())["ready"]:
                    return
            await asyncio.sleep(READY_POLL_S)


class ServedAdapter(ServedModel):
    """An adapter of a model, which requests name like a model: it has all else of its base.

    Args:
        base: the model.
        name: the adapter's.
    """

    def __init__(self, base: ServedModel, name: str) -> None:
        self._base = base
        self.name = name
        self.config, self.preload, self.adapters = base.config, base.preload, base.adapters
        self.first_aliases = ()
        self.client, self.lasting_client = base.client, base.lasting_client
        self.server_info, self.answers, self.recent = base.server_info, base.answers, base.recent
        self.progress, self.lasting_progress = base.progress, base.lasting_progress

    @property
    def base(self) -> ServedModel:
        """The model that has weights of its own."""
        return self._base

    @property
    def adapter(self) -> str:
        """Name of the adapter."""
        return self.name

    def is_called(self, name: str) -> bool:
        """Return whether the adapter is called so."""
        return name == self.name


class _NamedModel(msgspec.Struct):
    model: Any = None


_decode_name = msgspec.json.Decoder(_NamedModel).decode


class ServedModels(Collection[ServedModel]):
    """All models, in order. The first one is the default: it answers requests that name none.

    Args:
        models: at least one.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._by_name = {model.name: model for model in models}
        self._aliases: dict[str, Alias] = {}
        for model in models:
            for name in model.first_aliases:
                self.move(Alias(name=name, model=model.name))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, model: object) -> bool:
        return model in self._models

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self._models[0]

    # --- names ------------------------------------------------------------------------------------

    def find(self, name: str, request_id: str = "") -> ServedModel | None:
        """Return the model that is called so; names and aliases come before paths.

        Args:
            name: a name, an alias or a path.
            request_id: the X-Request-Id, which decides whether the request gets the canary of an
                alias; "": it does not.
        """
        if (alias := self._aliases.get(name)) is not None:
            chosen = self._by_name[alias.model_of(request_id) if request_id else alias.model]
            return self._by_name[alias.model] if chosen.state == LOST else chosen
        found = self._by_name.get(name)
        found = found or next((model for model in self._models if model.is_called(name)), None)
        return found or self._adapter(name)

    def _adapter(self, name: str) -> ServedAdapter | None:
        """Return the adapter of this name, of the first model that has one."""
        for model in self._models:
            if model.adapters is not None and model.adapters.find(name) is not None:
                return ServedAdapter(model, name)
        return None

    def alias(self, name: str) -> Alias | None:
        """Return the alias of this name."""
        return self._aliases.get(name)

    def named(self, name: str) -> ServedModel | None:
        """Return the model whose own name this is."""
        return self._by_name.get(name)

    def move(self, alias: Alias) -> None:
        """Give later requests with this alias the models that it says. Both are served."""
        self._aliases[alias.name] = alias

    def aliases_of(self, model: ServedModel) -> list[str]:
        """Return the aliases of a model, without those of which it has a share alone."""
        return [alias.name for alias in self._aliases.values() if alias.model == model.name]

    def canaries_of(self, model: ServedModel) -> dict[str, float]:
        """Return the aliases of which a model has a share of the requests, and the shares."""
        return {
            alias.name: alias.canary
            for alias in self._aliases.values()
            if alias.canary_model == model.name
        }

    def missing(self, name: str) -> ApiError:
        """Return the error for a name that no model has."""
        return ApiError(
            404,
            f"model {name!r} is not served here: {self.advice(name)}",
            param="model",
            code="model_not_found",
        )

    def advice(self, name: str = "") -> str:
        """Return "use …" with the names of models: all if they are few, else those like `name`."""
        names = [model.name for model in self._models]
        for model in self._models:
            names += [] if model.adapters is None else [one.name for one in model.adapters.all()]
        if len(names) > MAX_NAMED_MODELS:
            names = similar(name[:MAX_COMPARED_CHARS], [*names, *self._aliases])
        if not names:
            return "GET /v1/models lists what is"
        *others, last = map(repr, names)
        return f"use {', '.join(others)} or {last}" if others else f"use {last}"

    def of_body(self, body: bytes, request_id: str) -> ServedModel | None:
        """Return the model that answers a request; None: it names one that is not served.

        Args:
            body: JSON.
            request_id: as in `find`.
        """
        try:
            name = _decode_name(body).model
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            name = None
        return self.find(name, request_id) if isinstance(name, str) else self.default

    # --- all models -------------------------------------------------------------------------------

    async def each(self, ask: Callable[[ServedModel], Awaitable[T]]) -> list[T | QuadrigaError]:
        """Ask all models at one time. Return the answer of each, or why it has none."""
        answers = await asyncio.gather(*map(ask, self._models), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, QuadrigaError):
                raise answer
        return cast("list[T | QuadrigaError]", answers)

    async def known(self, ask: Callable[[ServedModel], Awaitable[T]]) -> list[T]:
        """Ask all models at one time. Return the answers, without models that give none.

        Raises:
            QuadrigaError: no model answers; it is the first one's reason.
        """
        answers = await self.each(ask)
        found = [answer for answer in answers if not isinstance(answer, QuadrigaError)]
        if not found:
            raise cast(QuadrigaError, answers[0])
        return found

    async def names_of(self, is_able: Callable[[dict[str, Any]], bool]) -> list[str]:
        """Return the names of the models whose info says that they can do something.

        A model that does not answer is left out.
        """
        infos = await self.each(lambda model: model.server_info.static())
        return [
            model.name
            for model, info in zip(self._models, infos, strict=True)
            if not isinstance(info, QuadrigaError) and is_able(info)
        ]
