"""What is sent, and when."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from quadriga.errors import ConfigError

DEFAULT_PROMPT = "Hello, my name is"

Prompt = str | list[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """interval: seconds between two submits. absolute: counted from the start of the run, so that
    a late request does not delay those after it; else from the end of the submit before.
    """

    interval: float = 0.0
    absolute: bool = False

    def planned(self, index: int, start: float) -> float | None:
        """When request `index` should leave; None where the schedule names no time."""
        return start + index * self.interval if self.absolute else None

    def due(self, index: int, start: float, previous_end: float) -> float:
        """When request `index` may leave, given the end of the submit before it."""
        planned = self.planned(index, start)
        if planned is not None:
            return planned
        return start if index == 0 else previous_end + self.interval


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of every run, `count` of them in each.

    Measured runs and warm-ups have a number each, and no two runs share a prompt: a run that
    repeats another's would be served from the prefix cache, and measure nothing. Run 0 sends the
    text as it is given; in other runs, and in front of every prompt where they shall be unique,
    stands a word that differs from its first letter on.
    """

    count: int
    text: str = DEFAULT_PROMPT
    unique: bool = False
    random_ids: int | None = None
    seed: int = 0

    def prompts(self, run: int, vocab_size: int | None = None) -> list[Prompt]:
        """The prompts of a run. vocab_size: ids to draw from, for `random_ids`."""
        if self.random_ids is not None:
            if vocab_size is None:
                raise ConfigError("--random-input-len needs a server that tells its vocab_size")
            return [self._random(run, index, vocab_size) for index in range(self.count)]
        if self.unique:
            first = run * self.count
            return [f"{word(first + index)} {self.text}" for index in range(self.count)]
        return [self.text if run == 0 else f"{word(run - 1)} {self.text}"] * self.count

    def _random(self, run: int, index: int, vocab_size: int) -> Prompt:
        """Random ids. The first counts through the vocabulary, so that no two prompts share it."""
        assert self.random_ids is not None
        number = run * self.count + index
        source = random.Random(f"{self.seed}/{number}")
        first = random.Random(self.seed).randrange(vocab_size) + number
        rest = [source.randrange(vocab_size) for _ in range(self.random_ids - 1)]
        return [first % vocab_size, *rest]


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


def pretokenize(prompts: list[Prompt], encode: Callable[[str], list[int]]) -> list[Prompt]:
    """The same prompts as token ids; equal texts are encoded once."""
    known: dict[str, list[int]] = {}
    ids: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if prompt not in known:
                known[prompt] = encode(prompt)
            ids.append(known[prompt])
        else:
            ids.append(prompt)
    return ids
