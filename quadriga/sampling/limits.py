"""The ranges of all request parameters in one table, so that no request can harm the others.

validation.py checks requests against `LIMITS`, the gateway's OpenAPI document is made from it, and
a test compares the range column of docs/sampling.md with it.
"""

from typing import NamedTuple

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_GRAMMAR_CHARS = 128 * 1024


class Range(NamedTuple):
    """Bounds of one parameter, inclusive.

    Attributes:
        minimum: smallest number, or smallest value of a map.
        maximum: largest number, or largest value of a map.
        excludes_minimum: True if `minimum` itself is out of range.
        note: what an error adds about special values.
        min_items: smallest number of items of a list or a map.
        max_items: largest number of items of a list or a map.
        items: noun for the items.
        max_chars: largest number of characters of a text, or of each text of a list.
    """

    minimum: float | None = None
    maximum: float | None = None
    excludes_minimum: bool = False
    note: str = ""
    min_items: int = 0
    max_items: int | None = None
    items: str = ""
    max_chars: int | None = None

    def contains(self, number: float) -> bool:
        """Return whether a number is within the bounds; NaN never is."""
        assert self.minimum is not None
        if self.excludes_minimum and number == self.minimum:
            return False
        return self.minimum <= number <= (float("inf") if self.maximum is None else self.maximum)

    @property
    def rule(self) -> str:
        """The rule that a number must obey, for an error message."""
        if self.maximum is None:
            return f"must be at least {self.minimum}{self.note}"
        if self.excludes_minimum:
            return f"must be in ({self.minimum}, {self.maximum}]{self.note}"
        return f"must be from {self.minimum} to {self.maximum}{self.note}"


_PENALTY = Range(-2, 2, note="; 0 is off")
_LOGPROBS = Range(0, 20)
_GRAMMAR = Range(max_chars=MAX_GRAMMAR_CHARS)
_MARK = Range(max_chars=64)

LIMITS = {
    "max_new_tokens": Range(1),
    "min_new_tokens": Range(0),
    # Above this temperature, and below the smallest repetition penalty, float32 logits overflow.
    "temperature": Range(0, 1_000_000, note="; 0 is greedy"),
    "top_k": Range(-1, 2**31 - 1, note="; -1 and 0 are off"),
    "top_p": Range(0, 1, excludes_minimum=True, note="; 1 is off"),
    "min_p": Range(0, 1, note="; 0 is off"),
    "repetition_penalty": Range(0.001, 2, note="; 1 is off"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
    "seed": Range(0, MAX_SEED),
    "n": Range(1, MAX_CHOICES),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "priority": Range(-1000, 1000),
    "ttft_target": Range(0, 604_800, excludes_minimum=True, note=" seconds"),
    "logit_bias": Range(-100, 100, max_items=1024, items="ids"),
    "stop": Range(max_items=16, items="strings", max_chars=256),
    "stop_regex": Range(max_items=4, items="strings", max_chars=256),
    "bad_words": Range(max_items=128, items="strings", max_chars=64),
    "stop_token_ids": Range(max_items=256, items="ids"),
    "allowed_token_ids": Range(min_items=1),
    "json_schema": _GRAMMAR,
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "choice": Range(min_items=1, max_chars=MAX_GRAMMAR_CHARS),
    "structural_tag": _GRAMMAR,
    "thinking_token_budget": Range(0),
    "thinking_end": _MARK,
    "thinking_start": _MARK,
    "logprob_token_ids": Range(max_items=128, items="ids"),
}
