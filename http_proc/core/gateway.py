"""The state that all APIs share: the models that are served, and what is being answered.

Other parts, such as the batches, are the gateway's under a Key.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from http_proc.core import errors, gen_ai, observe, request_group, shares
from http_proc.core.caller import current_caller
from http_proc.core.resumption import current_resumption
from http_proc.core.served_model import ServedModel, ServedModels, wall_seconds
from quadriga.errors import QuadrigaError, ServerStopping
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.logs import RequestLogLevel
from quadriga.server.tenants import TenantFile, parent_name
from quadriga.server.tracing.export import make_exporter

# Of all bodies that are being received, and of all stored items that open requests hold, unless
# --max-body-bytes is more than half of it.
MAX_TOTAL_BODY_BYTES = 256 * 1024 * 1024

# Stands between the X-Request-Id, which has no such character, and what makes an id unique.
UNIQUE_MARK = "~"

_ID_PREFIX = re.compile(r"^[a-z]+[-_]")
T = TypeVar("T")


class Key(Generic[T]):
    """The name of a part of the gateway that the gateway does not know, and the part's type."""

    def __init__(self, name: str) -> None:
        self.name = name


class Gateway:
    """State of one web server.

    Attributes:
        config: the flags of the gateway; those of each model are the model's.
        models: what is served.
        run_dir: private directory of the server's run; None: one for sockets alone, below the
            directory for temporary files.
        data_dir: directory of what is kept for clients; None: nothing is kept.
        outlives_server: what is kept stays when the server ends.
        tenant_file: the tenants of --keys; None without the flag.
        log_level: which requests are logged.
        gen_ai: histograms of OpenTelemetry's conventions.
        traces: decides which requests are traced, and keeps their traces.
        shares: how bounds are divided among tenants.
        bodies: bytes of request bodies that are being received.
        stored_items: bytes of the stored items to which open requests refer, unpacked.
    """

    def __init__(
        self,
        config: ServerConfig,
        models: ServedModels,
        run_dir: Path | None = None,
    ) -> None:
        self.config = config
        self.models = models
        self.args = config.http
        self.run_dir = run_dir
        self.outlives_server = config.data_dir is not None
        in_run = None if run_dir is None else run_dir / "data"
        self.data_dir = None if config.http.no_store else config.data_dir or in_run
        keys = config.tenants.keys
        self.tenant_file = TenantFile(Path(keys), directory=run_dir) if keys else None
        self.metrics = observe.RequestMetrics()
        self.gen_ai = gen_ai.GenAiMetrics()
        self.log_level = RequestLogLevel.of(config.launch)
        exporter = make_exporter(config.traces, models.default.name)
        self.traces = observe.WebTraces(config.traces, exporter)
        self.started_at = wall_seconds()
        self.is_draining = False
        self.shares = shares.Shares(config.tenants, self.tenant_file)
        self.bodies = shares.SharedBound(
            self.shares, max(MAX_TOTAL_BODY_BYTES, 2 * config.http.max_body_bytes)
        )
        self.stored_items = shares.SharedBound(self.shares, self.bodies.limit)
        self._idle = asyncio.Event()
        self._idle.set()
        self._groups: dict[str, request_group.RequestGroup] = {}
        self._parts: dict[Key[Any], Any] = {}

    def __setitem__(self, key: Key[T], part: T) -> None:
        self._parts[key] = part

    def __getitem__(self, key: Key[T]) -> T:
        return cast(T, self._parts[key])

    def get(self, key: Key[T]) -> T | None:
        """Return a part; None where the gateway does not have it."""
        return self._parts.get(key)

    def served(self, name: str | None, record: observe.CallRecord) -> ServedModel:
        """Return the model of a request that names it so; None: the default one.

        Args:
            name: a name, an alias or a path.
            record: of the call, whose X-Request-Id chooses where an alias has a canary, and where
                the model is noted if there are several.

        Raises:
            ApiError: 404, no model is called so.
        """
        models = self.models
        model = models.default if name is None else models.find(name, record.request_id)
        if model is None:
            raise self.models.missing(name or "")
        if len(self.models) > 1 or model.adapter:
            record.model = model.name
        asked = record.inference
        asked.model = model.name
        # A path has several forms: the model's name stands for all of them.
        asked.named = name if name and models.alias(name) else model.name if name else ""
        return model

    @contextmanager
    def open_group(
        self, model: ServedModel, rid: str, names: Mapping[str, str], record: observe.CallRecord
    ) -> Iterator[request_group.RequestGroup]:
        """Register a request group for a `with` block. Errors of the server leave it as ApiErrors.

        Args:
            model: answers the requests.
            rid: id by which /abort_request finds the group.
            names: the request's name of each field of the server.
            record: of the call that is answered.
        """
        if self.is_draining:
            error = ServerStopping("the server is stopping and takes no new requests")
            raise errors.from_server(error, names)
        while rid in self._groups:
            rid += "+"
        group = self._groups[rid] = request_group.RequestGroup(
            model,
            request_group.GroupNotes(names, record, self.metrics),
            current_caller().name,
            current_resumption(),
        )
        self._idle.clear()
        try:
            with group:
                yield group
        except QuadrigaError as error:
            raise errors.from_server(error, names) from None
        except asyncio.CancelledError:
            self.metrics.num_disconnects += 1
            raise
        finally:
            del self._groups[rid]
            if not self._groups:
                self._idle.set()

    @property
    def num_open(self) -> int:
        """Number of web requests that are being answered."""
        return len(self._groups)

    def num_open_of(self, model: ServedModel) -> int:
        """Return the number of web requests that a model is answering."""
        return sum(group.model.base is model for group in self._groups.values())

    def num_choices_of(self, model: ServedModel) -> int:
        """Return the number of choices that a model has not finished, of all web requests."""
        return sum(g.num_unfinished for g in self._groups.values() if g.model.base is model)

    def is_open(self, rid: str) -> bool:
        """Return whether a request of this id is being answered."""
        return rid in self._groups

    def caller_ids(self) -> dict[str, str]:
        """Return the X-Request-Id of each open request of the server, by its id there."""
        return {
            request_id: group.caller_id
            for group in self._groups.values()
            for request_id in group.request_ids
        }

    def open_groups(self, rid: str | None) -> list[request_group.RequestGroup]:
        """Return what is being answered of `rid`, an answer's id or its X-Request-Id; None: all.

        A tenant reaches only its own.
        """
        caller = current_caller().tenant
        return [
            group
            for name, group in self._groups.items()
            if (rid is None or _matches(name, rid))
            and (not caller or parent_name(group.tenant) == caller)
        ]

    async def abort(self, rid: str | None) -> int:
        """End the open groups of `rid`, or all for None. Return how many web requests that were."""
        groups = self.open_groups(rid)
        for group in groups:
            await group.abort()
        return len(groups)

    async def abort_resumable(self, key: str) -> bool:
        """End the open groups of a resumable request. Return whether there was one.

        `key`: as Resumption.key.
        """
        groups = [
            group
            for group in self._groups.values()
            if group.resumption is not None and group.resumption.key == key
        ]
        for group in groups:
            await group.abort()
        return bool(groups)

    def fail_all(self, error: QuadrigaError) -> None:
        """End every open request with `error`: the server sends nothing more."""
        for group in self._groups.values():
            group.fail(error)

    async def drain(self, flush_timeout_s: float) -> None:
        """Refuse new requests and wait until the open ones are answered.

        After the server has finished them all, slow clients have `flush_timeout_s` to read them.
        """
        self.is_draining = True
        for group in list(self._groups.values()):
            await group.finished.wait()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), flush_timeout_s)

    async def until_ready(self) -> None:
        """Wait until every model can serve that is loaded at the start."""
        await asyncio.gather(*(model.until_ready() for model in self.models if model.preload))


def _matches(name: str, rid: str) -> bool:
    """Return whether `rid` is the id of the answer `name`, with or without its prefix."""
    name = name.rstrip("+")
    return rid in (name, without_prefix(name))


def without_prefix(answer_id: str) -> str:
    """Return the X-Request-Id of which the id of an answer was made."""
    return _ID_PREFIX.sub("", answer_id).partition(UNIQUE_MARK)[0]
