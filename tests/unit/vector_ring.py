"""Scripted rings that give each text a vector, or scores."""

import asyncio
from array import array
from typing import Any

from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.wire.client import Usage
from tests.unit.scripted_ring import FACTS, ScriptedHandle, ScriptedRing


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
        self._prompt = self.prompt_of(prompt, *arguments)
        return super().submit(prompt, *arguments, **options)

    def prompt_of(self, prompt: Any, *_: Any) -> Any:
        """Return that of a request on which its vector depends."""
        return prompt

    def vector(self, prompt: Any) -> "array[float]":
        """Return the vector of a prompt."""
        return array("f", [float(len(prompt)), -1.5, 0.25])

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
            vector = self.vector(prompt)
            usage = Usage(len(prompt), 0)
            times = Timings(1.0, 2.0, 2.25, 3.0, 3.5, 4.0, 5.0)
            completion = Completion("r", "", [], "stop", usage, times, vector=vector)
            sink(StreamChunk("r", "", [], [], 0.0, completion))


class ScoreRing(VectorRing):
    """Scores a pair by the length of its second text, and a text by its own for each label."""

    def __init__(self, *labels: str) -> None:
        super().__init__()
        self.labels = labels
        self.facts = {**FACTS, "scores": {"labels": list(labels), "probabilities": "softmax"}}

    def prompt_of(self, prompt: Any, *arguments: Any) -> Any:
        second = arguments[0].pooling.text_pair
        return prompt if second is None else second

    def vector(self, prompt: Any) -> "array[float]":
        numbers = range(max(1, len(self.labels)))
        return array("f", [len(prompt) + 0.5 * (number % 2) for number in numbers])
