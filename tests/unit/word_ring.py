"""A scripted ring that gives the probabilities of words, for decisions."""

import asyncio
import math
from array import array
from typing import Any

from quadriga.client.types import Completion, RenderedPrompt, StreamChunk, Timings
from quadriga.sampling.pooling import LOGPROBS
from quadriga.wire.client import Usage
from tests.unit.scripted_ring import ScriptedHandle, ScriptedRing

ROLE = "\nassistant:"
# Probabilities of words after anything.
LARGEST = 0.5
WORDS = {"Yes": 0.3, "No": 0.1, "Paris": 0.2, "New": 0.1, "York": 0.5, "bad": 0.02, "good": 0.06}


class WordRing(ScriptedRing):
    """A model whose tokens are words, and characters of everything else.

    A word is a token of its own behind the role, and behind a space.
    """

    def __init__(self) -> None:
        super().__init__([], context_length=4096)
        self.words = list(WORDS)
        self.prompts: list[str] = []
        self.chats: list[Any] = []

    def ids_of(self, text: str) -> list[int]:
        head, role, answer = text.rpartition(ROLE)
        ids = [1000 + ord(letter) for letter in head + role]
        for word in answer.split(" ") if answer else []:
            known = word in self.words
            ids += [self.words.index(word)] if known else [1000 + ord(letter) for letter in word]
        return ids

    async def render(self, prompt: Any, chat: Any = None) -> RenderedPrompt:
        text = "".join(f"{turn['role']}: {turn['content']}\n" for turn in prompt) + ROLE
        self.prompts.append(text)
        self.chats.append(chat)
        return RenderedPrompt(text, self.ids_of(text))

    async def tokenize(self, prompt: Any, chat: Any = None) -> list[int]:
        return self.ids_of(prompt)

    def submit(self, prompt: Any, params: Any, **options: Any) -> ScriptedHandle:
        self._asked = (prompt, params.pooling)
        return super().submit(prompt, params, **options)

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        prompt, pooling = self._asked
        assert pooling.method == LOGPROBS
        ids = pooling.token_ids or prompt[len(prompt) - pooling.num_last :]
        of_words = [math.log(probability) for probability in WORDS.values()]
        of_letter = math.log(min(WORDS.values()))
        scores = array("f", [of_words[i] if i < len(of_words) else of_letter for i in ids])
        if pooling.with_largest:
            scores.extend([math.log(LARGEST)] * (len(ids) if pooling.num_last else 1))
        completion = Completion(
            "r", "", [], "stop", Usage(len(prompt), 0, 5), Timings(0.0), vector=scores
        )
        handle.done = True
        chunk = StreamChunk("r", "", [], [], 0.0, completion)
        asyncio.get_running_loop().call_soon(sink, chunk)
