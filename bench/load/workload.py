"""What is sent: the prompts of every run."""

import dataclasses
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.load.trace import FIRST_ID, TraceRequest, prompt_ids
from quadriga.errors import ConfigError

DEFAULT_PROMPT = "Hello, my name is"

GOLDEN_RATIO = 0.6180339887
"""Its multiples, modulo 1, stay far from one another: each run shifts ids by another distance."""

Prompt = str | list[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send. prompt: its own part, where it continues another request."""

    request: TraceRequest
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests, and their prompts in every run.

    Measured runs and warm-ups have a number each, and no two runs share a prompt: a run that
    repeats another's would be served from the prefix cache, and measure nothing. What the prompts
    of one run share is the same in every run.

    text: the prompt of all requests, or of each; None: token ids, as the requests say. Run 0 sends
    the text as it is given; in other runs, and in front of every prompt where they shall be
    unique, stands a word that differs from its first letter on. Literal ids are sent as they are in
    run 0, and as others in other runs.
    repeat: every run sends what run 0 sends. Then the prefix cache serves them, as far as prompts
    fill pages; it does not where a prompt is shorter than one.
    """

    requests: Sequence[TraceRequest]
    text: str | Sequence[str] | None = DEFAULT_PROMPT
    unique: bool = False
    seed: int = 0
    repeat: bool = False

    def jobs(self, run: int, vocab_size: int | None = None) -> list[PlannedRequest]:
        """The jobs of a run. vocab_size: ids to draw from, where no text is sent."""
        run = 0 if self.repeat else run
        prompts = self._texts(run) if self.text is not None else self._ids(run, vocab_size)
        return [PlannedRequest(*pair) for pair in zip(self.requests, prompts, strict=True)]

    def _texts(self, run: int) -> Sequence[Prompt]:
        count = len(self.requests)
        texts = [self.text] * count if isinstance(self.text, str) else self.text or ()
        if self.unique:
            return [f"{word(run * count + index)} {text}" for index, text in enumerate(texts)]
        return list(texts) if run == 0 else [f"{word(run - 1)} {text}" for text in texts]

    def _ids(self, run: int, vocab_size: int | None) -> Sequence[Prompt]:
        if vocab_size is None or vocab_size <= FIRST_ID:
            raise ConfigError(
                "token ids are drawn from the vocabulary, and the server says that its"
                f" vocab_size is {vocab_size}: send a text with --prompt"
            )
        seed = self.seed if run == 0 else f"{self.seed}/{run}"
        return [
            prompt_ids(_other_ids(request, run, vocab_size), vocab_size, seed).tolist()
            for request in self.requests
        ]


def _other_ids(request: TraceRequest, run: int, vocab_size: int) -> TraceRequest:
    """Each literal id replaced by another one, so that equal prefixes of one run stay equal."""
    if run == 0 or not request.ids:
        return request
    drawable = vocab_size - FIRST_ID
    shift = int(run * GOLDEN_RATIO % 1 * drawable)
    ids = tuple(FIRST_ID + (token - FIRST_ID + shift) % drawable for token in request.ids)
    return dataclasses.replace(request, ids=ids)


def word(number: int) -> str:
    """A word for each number >= 0; of any 52 in a row, no two begin with the same letter."""
    letters = string.ascii_letters
    text = ""
    while True:
        number, rest = divmod(number, len(letters))
        text += letters[rest]
        if number == 0:
            return text
        number -= 1


def pretokenize(
    jobs: Sequence[PlannedRequest], encode: Callable[[str], list[int]]
) -> list[PlannedRequest]:
    """The same jobs with token ids as prompts; equal texts are encoded once."""
    known: dict[str, list[int]] = {}
    encoded = []
    for job in jobs:
        if isinstance(job.prompt, str):
            if job.prompt not in known:
                known[job.prompt] = encode(job.prompt)
            job = PlannedRequest(job.request, known[job.prompt])
        encoded.append(job)
    return encoded
