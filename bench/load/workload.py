"""Workloads: requests and their prompts in every run, as token ids or as texts."""

import dataclasses
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quadriga.errors import ConfigError
from quadriga.programs import install_command
from quadriga.server.config.engine_args import ModelArgs
from simulator.trace import MIN_TOKEN_ID, TraceRequest, prompt_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


DEFAULT_PROMPT = "Hello, my name is"

# Its multiples modulo 1 stay far from one another: each run shifts ids by another distance.
GOLDEN_RATIO = 0.6180339887

Prompt = str | list[int]  # text, or token ids


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send, with its new part of the prompt if it continues another request."""

    request: TraceRequest
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests, and their prompts in every run.

    Measured runs and warm-ups are numbered, and no two runs share a prompt: otherwise the prefix
    cache would serve the second one. The sharing of prefixes within a run is the same in every run.
    Run 0 sends texts and literal ids as given. Other runs put a word in front of each text, and
    replace each literal id by another one.

    Attributes:
        text: prompt of all requests, or one per request; None: token ids of the requests' segments.
        unique: put a word that differs from its first letter on in front of every text.
        repeat: send the prompts of run 0 in every run, so that the prefix cache can serve them.
    """

    requests: Sequence[TraceRequest]
    text: str | Sequence[str] | None = DEFAULT_PROMPT
    unique: bool = False
    seed: int = 0
    repeat: bool = False

    def jobs(self, run: int, vocab_size: int | None = None) -> list[PlannedRequest]:
        """Return the jobs of a run; `vocab_size` is needed if no text is sent."""
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
        if vocab_size is None or vocab_size <= MIN_TOKEN_ID:
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
    """Replace each literal id by another one; equal prefixes within a run stay equal."""
    if run == 0 or not request.ids:
        return request
    drawable = vocab_size - MIN_TOKEN_ID
    shift = int(run * GOLDEN_RATIO % 1 * drawable)
    ids = tuple(MIN_TOKEN_ID + (token - MIN_TOKEN_ID + shift) % drawable for token in request.ids)
    return msgspec.structs.replace(request, ids=ids)


def word(number: int) -> str:
    """Return a word for a number >= 0; any 52 consecutive words differ in their first letter."""
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
    """Return the jobs with token ids as prompts; equal texts are encoded once."""
    known: dict[str, list[int]] = {}
    encoded = []
    for job in jobs:
        if isinstance(job.prompt, str):
            if job.prompt not in known:
                known[job.prompt] = encode(job.prompt)
            job = PlannedRequest(job.request, known[job.prompt])
        encoded.append(job)
    return encoded


# A space, as byte-level and SentencePiece vocabularies write it, and lower-case letters.
WORD = re.compile("[Ġ▁][a-z]{2,}")
MIN_VOCABULARY_WORDS = 1000


class Speller:
    """Spells token ids as words, each of which is one token between any other words.

    Raises ConfigError for a vocabulary with too few such words.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        vocabulary = tokenizer.get_vocab()
        self._tokenizer = tokenizer
        self._words = sorted(f" {token[1:]}" for token in vocabulary if WORD.fullmatch(token))
        if len(self._words) < MIN_VOCABULARY_WORDS:
            raise ConfigError(
                f"the tokenizer has only {len(self._words)} words to make texts of (at least"
                f" {MIN_VOCABULARY_WORDS}): send ids"
            )

    def spell(self, ids: Sequence[int]) -> str:
        """Return a text of len(ids) tokens, the same for the same ids, or raise ConfigError."""
        text = "".join(self._words[token % len(self._words)] for token in ids)
        tokens = len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if tokens != len(ids):
            raise ConfigError(
                f"{len(ids)} words became {tokens} tokens: this tokenizer joins or splits them,"
                " so that lengths would not be exact; send ids"
            )
        return text


def spelled(jobs: Sequence[PlannedRequest], speller: Speller) -> list[PlannedRequest]:
    """Return the jobs with texts in place of token ids."""
    return [
        dataclasses.replace(job, prompt=speller.spell(job.prompt))
        if isinstance(job.prompt, list)
        else job
        for job in jobs
    ]


def tokenizer_of(name: str, model: ModelArgs) -> "Tokenizer":
    """Return the tokenizer of a directory or model `name`, or of `model` if the name is "".

    Raises:
        ModelError: the model has no tokenizer.
        ConfigError: a package that loads it is not installed.
    """
    try:
        from quadriga.server.models.formats.tokenizer import load_tokenizer
        from quadriga.server.models.resolve import find_tokenizer, resolve_model
    except ImportError as error:
        raise ConfigError(
            f"the bench needs a tokenizer, and {error.name} is not installed:"
            f" {install_command('serve')}, or use --random-input-len with --prompt-form ids"
        ) from None
    if name:
        return load_tokenizer(find_tokenizer(name, show_progress=True))
    return load_tokenizer(resolve_model(model, show_progress=True).tokenizer_dir)
