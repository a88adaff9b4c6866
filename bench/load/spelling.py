"""Turn random token ids into texts of as many tokens, for servers that take no token ids."""

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.load.workload import PlannedRequest
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A space, as byte-level and SentencePiece vocabularies write it, and lower-case letters.
WORD = re.compile("[Ġ▁][a-z]{2,}")
MIN_WORDS = 1000


class Speller:
    """Spells token ids as words, each of which is one token between any other words.

    Raises ConfigError for a vocabulary with too few such words.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        vocabulary = tokenizer.get_vocab()
        self._tokenizer = tokenizer
        self._words = sorted(f" {token[1:]}" for token in vocabulary if WORD.fullmatch(token))
        if len(self._words) < MIN_WORDS:
            raise ConfigError(
                f"the tokenizer has only {len(self._words)} words to make texts of (at least"
                f" {MIN_WORDS}): send ids"
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
