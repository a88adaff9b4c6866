"""A scripted ring that gives each text a vector."""

import asyncio
from array import array
from typing import Any

from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.wire.client import Usage
from tests.unit.scripted_ring import ScriptedHandle, ScriptedRing


class VectorRing(ScriptedRing):
    """Answers each text with a vector of its length, in the reverse order of a few.

    Attributes:
        most_open: the largest number of requests that were open at one time.
    """

    def __init__(self) -> None:
        super().__init__([])
        self.most_open = 0
        self._open: list[tuple[ScriptedHandle, Any, Any]] = []

    def submit(self, prompt: Any, *arguments: Any, **options: Any) -> ScriptedHandle:
        self._prompt = prompt
        return super().submit(prompt, *arguments, **options)

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        if self.error is not None:
            super()._answer(handle, sink)
            return
        self._open.append((handle, sink, self._prompt))
        self.most_open = max(self.most_open, len(self._open))
        asyncio.get_running_loop().call_later(0.001, self._end_last)

    def _end_last(self) -> None:
        if self._open:
            handle, sink, prompt = self._open.pop()
            handle.done = True
            vector = array("f", [float(len(prompt)), -1.5, 0.25])
            usage = Usage(len(prompt), 0)
            completion = Completion("r", "", [], "stop", usage, Timings(0.0), vector=vector)
            sink(StreamChunk("r", "", [], [], 0.0, completion))
