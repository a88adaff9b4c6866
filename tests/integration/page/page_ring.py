"""A scripted ring whose requests the test of a page ends."""

import asyncio
import math
from typing import Any

from quadriga.client.types import LikelyToken, StreamChunk, TokenLogprob
from quadriga.errors import QuadrigaError
from quadriga.server.answer_format import AnswerFormat, ReasoningFormat, to_info
from tests.unit.scripted_ring import HERMES, ScriptedHandle, ScriptedRing, chunk

THINKING = to_info(AnswerFormat(calls=HERMES, reasoning=ReasoningFormat(switch="enable_thinking")))


class OpenRing(ScriptedRing):
    """Requests begin with `pieces` and go on until the test or an abort ends them."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__(pieces)
        self.leaves_open = True
        self.num_aborted = 0

    async def abort(self, request_id: str) -> None:
        self.num_aborted += 1
        self.finish_reason = "abort"
        self.finish()
        self.finish_reason = "stop"

    def push(self, text: str) -> None:
        """Send a piece of the last request's answer."""
        self.sinks[-1](chunk(text))

    def finish(self, text: str = "") -> None:
        """End the last request's answer."""
        self.handles[-1].done = True
        self.sinks[-1](chunk(text, self.completion()))

    def fail(self, error: QuadrigaError) -> None:
        """End the last request with an error."""
        self.handles[-1].done = True
        self.sinks[-1](error)


GIVEN_TEXTS = {1: "One", 2: "other"}


class GivenRing(ScriptedRing):
    """Answers begin with the tokens that the request gives: those of `fair_logprobs`."""

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        if given := self.submitted[-1][1].first_token_ids:
            item = chunk("".join(map(GIVEN_TEXTS.__getitem__, given)))
            item.token_ids, item.token_times = given, [0.0] * len(given)
            item.text_lengths = [len(GIVEN_TEXTS[token]) for token in given]
            item.logprobs = [TokenLogprob(i, None, GIVEN_TEXTS[i].encode(), []) for i in given]
            asyncio.get_running_loop().call_soon(sink, item)
        super()._answer(handle, sink)


class ChoicesRing(ScriptedRing):
    """Each choice of a request gets all the pieces."""

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        num_choices = self.submitted[-1][1].n
        for index in range(num_choices):
            super()._answer(handle, lambda item, index=index: sink(at_choice(item, index)))


def at_choice(item: StreamChunk, index: int) -> StreamChunk:
    item.index = index
    return item


def fair_logprobs(piece: str) -> list[TokenLogprob]:
    """Return the logprobs of a piece that is one token of probability 0.5; so is "other"."""
    half, text = math.log(0.5), piece.encode()
    top = [LikelyToken(1, half, text), LikelyToken(2, half, b"other")]
    return [TokenLogprob(1, half, text, top)]
