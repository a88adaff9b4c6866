"""Saving: keep one response when it ends."""

import asyncio

from http_proc.apis.responses.schema import ResponseObject
from http_proc.apis.responses.store import EndedResponse, Items, ResponseStore


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
        conversation = self._response.conversation
        ended = EndedResponse(
            self._response,
            self._input_items,
            self._is_kept,
            None if conversation is None else conversation.id,
            events,
        )
        self._task = asyncio.create_task(self._store.save(ended))

    async def done(self) -> None:
        """Wait until the response is kept, or cannot be: then its field `store` is false.

        The saving goes on if the caller is cancelled.
        """
        if self._task is not None and not await asyncio.shield(self._task):
            self._response.store = False
