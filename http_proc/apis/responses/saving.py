"""Saving: keep one response before its client sees the end."""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import EndedResponse, Items, ResponseStore
from http_proc.apis.responses.stream import ResponseStream
from http_proc.event_sink import EventSink
from http_proc.resumption import current_resumption, decided


class Saving:
    """The saving of one response.

    Args:
        store: where the response is kept.
        response: it is in its last state when `begin` is called.
        input_items: the items of its own request.
        is_kept: whether it is kept under its id.
    """

    def __init__(
        self, store: ResponseStore, response: ResponseObject, input_items: Items, is_kept: bool
    ) -> None:
        self._store = store
        self._response = response
        self._input_items = input_items
        self._is_kept = is_kept
        self._task: asyncio.Task[bool] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether anything of the response is kept."""
        return self._is_kept or self._response.conversation is not None

    def begin(self, events: bytes) -> None:
        """Hand the response to the store, before requests that its client sends afterwards.

        Args:
            events: its whole stream.
        """
        self._task = asyncio.create_task(self._save(events))

    async def _save(self, events: bytes) -> bool:
        conversation, resumption = self._response.conversation, current_resumption()
        ended = EndedResponse(
            self._response,
            self._input_items,
            self._is_kept,
            None if conversation is None else conversation.id,
            events,
            is_repeat=resumption is not None and resumption.is_resent,
        )
        is_saved: bool = await decided("is_saved", lambda: self._store.save(ended))
        return is_saved

    async def done(self) -> None:
        """Wait until the response is kept, or cannot be: then its field `store` is false.

        The saving goes on if the caller is cancelled.
        """
        if self._task is not None and not await asyncio.shield(self._task):
            self._response.store = False


class SavingSink:
    """An EventSink whose last event is sent when the response is kept, and says whether it is."""

    def __init__(self, sink: EventSink, saving: Saving, stream: ResponseStream) -> None:
        self._sink = sink
        self._saving = saving
        self._stream = stream

    async def open(self, headers: Mapping[str, str]) -> None:
        """Begin with the headers."""
        await self._sink.open(headers)

    async def write(self, data: bytes) -> None:
        """Take whole events."""
        if data:
            await self._sink.write(data)

    async def comment(self, line: bytes) -> None:
        """Take a comment."""
        await self._sink.comment(line)

    async def close(self) -> web.StreamResponse:
        """Send the last event, and the end."""
        await self._saving.done()
        await self._sink.write(self._stream.last())
        return await self._sink.close()
