"""SamplingParams: how tokens are chosen and when to stop. Validated once, here."""

import math

import msgspec

from quadriga.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 128
GREEDY_BELOW_TEMPERATURE = 1e-5
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling and stopping of one request. On the wire a map; absent fields take the defaults.

    max_new_tokens: at most so many tokens are generated (>= 1). None: 128, or as many as the
        model's context leaves, whichever is smaller.
    temperature: 0 (below 1e-5) is greedy; finite, >= 0.
    top_k: sample from the k likeliest tokens; -1 or 0 is off.
    top_p: sample from the smallest set of tokens whose probability reaches top_p, in (0, 1].
    seed: the same seed, prompt and parameters give the same tokens; 0 <= seed < 2^63.
        None: the front door draws one.
    stop: strings that end the text; they are not part of it.
    stop_token_ids: ids that end the generation, beside the model's own end-of-text ids.
    ignore_eos: the model's own end-of-text ids do not stop; stop_token_ids still do.
    skip_special_tokens: special tokens leave no text.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest for the first value out of its range."""
        _check(
            self.max_new_tokens is None or self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "must be at least 1",
        )
        _check(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "must be a finite number >= 0; 0 is greedy",
        )
        _check(
            -1 <= self.top_k <= MAX_TOP_K,
            "top_k",
            self.top_k,
            f"must be from 1 to {MAX_TOP_K}, or -1 for off",
        )
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]; 1 is off")
        _check(
            self.seed is None or 0 <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            f"must be from 0 to {MAX_SEED}",
        )
        self._validate_stops(vocab_size)

    def _validate_stops(self, vocab_size: int) -> None:
        strings = self.stop_strings
        _check(
            len(strings) <= MAX_STOP_STRINGS,
            "stop",
            f"{len(strings)} strings",
            f"at most {MAX_STOP_STRINGS} are allowed",
        )
        for string in strings:
            _check(string != "", "stop", '""', "must not hold an empty string")
            _check(
                len(string) <= MAX_STOP_STRING_LENGTH,
                "stop",
                f"{len(string)} characters",
                f"at most {MAX_STOP_STRING_LENGTH} are allowed for a string",
            )
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"{len(self.stop_token_ids)} ids",
            f"at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
        for token_id in self.stop_token_ids:
            _check(
                0 <= token_id < vocab_size,
                "stop_token_ids",
                token_id,
                f"ids of this model are 0 to {vocab_size - 1}",
            )


def _check(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field} is {value}: {rule}", field)
