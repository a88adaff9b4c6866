"""The ranges of SamplingParams: one request must not hurt the others, so every number has one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quadriga.errors import InvalidRequest
from quadriga.sampling.grammar import FIELDS, grammar_of

if TYPE_CHECKING:
    from quadriga.sampling.params import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_REGEXES = 4
MAX_STOP_REGEX_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 64
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 0.001
"""Beyond these two, the numbers that they make are none in float32."""
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_GRAMMAR_LENGTH = 128 * 1024


MAX_COUNTS = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_regex": (MAX_STOP_REGEXES, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "bad_words": (MAX_BAD_WORDS, "strings"),
    "logit_bias": (MAX_LOGIT_BIAS, "ids"),
}


def check_counts(values: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a list or map that is too long, before its items are looked at.
    values: of SamplingParams' fields, not typed yet."""
    for field, (most, what) in MAX_COUNTS.items():
        if isinstance(value := values.get(field), list | dict):
            _check_count(field, len(value), most, what)


def check_params(params: "SamplingParams", vocab_size: int) -> None:
    """Raise InvalidRequest for the first value out of its range."""
    _check_lengths(params)
    _check_filters(params)
    _check_penalties(params)
    _check_stops(params, vocab_size)
    _check_vocabulary_rules(params, vocab_size)
    _check_grammar(params)
    _check_answer(params)


def _check_lengths(params: "SamplingParams") -> None:
    most, least = params.max_new_tokens, params.min_new_tokens
    _check(most is None or most >= 1, "max_new_tokens", most, "must be at least 1")
    _check(least >= 0, "min_new_tokens", least, "must be at least 0")
    _check(
        most is None or least <= most,
        "min_new_tokens",
        least,
        f"must not be above max_new_tokens, which is {most}",
    )


def _check_filters(params: "SamplingParams") -> None:
    temperature, top_k, top_p, min_p = (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
    )
    _check(
        temperature is None or 0 <= temperature <= MAX_TEMPERATURE,
        "temperature",
        temperature,
        f"must be from 0 to {MAX_TEMPERATURE:.0f}; 0 is greedy",
    )
    _check(
        top_k is None or -1 <= top_k <= MAX_TOP_K,
        "top_k",
        top_k,
        f"must be from 1 to {MAX_TOP_K}, or -1 for off",
    )
    _check(top_p is None or 0 < top_p <= 1, "top_p", top_p, "must be in (0, 1]; 1 is off")
    _check(min_p is None or 0 <= min_p <= 1, "min_p", min_p, "must be in [0, 1]; 0 is off")
    seed = params.seed
    _check(seed is None or 0 <= seed <= MAX_SEED, "seed", seed, f"must be from 0 to {MAX_SEED}")


def _check_penalties(params: "SamplingParams") -> None:
    for field in ("frequency_penalty", "presence_penalty"):
        value = getattr(params, field)
        _check(-2 <= value <= 2, field, value, "must be in [-2, 2]; 0 is off")
    factor = params.repetition_penalty
    _check(
        factor is None or MIN_REPETITION_PENALTY <= factor <= 2,
        "repetition_penalty",
        factor,
        f"must be from {MIN_REPETITION_PENALTY} to 2; 1 is off",
    )


def _check_stops(params: "SamplingParams", vocab_size: int) -> None:
    _check_texts("stop", params.stop_strings, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)
    _check_texts("stop_regex", params.stop_regexes, MAX_STOP_REGEXES, MAX_STOP_REGEX_LENGTH)
    ids = params.stop_token_ids
    _check_count("stop_token_ids", len(ids), MAX_STOP_TOKEN_IDS, "ids")
    _check_ids("stop_token_ids", ids, vocab_size)


def _check_vocabulary_rules(params: "SamplingParams", vocab_size: int) -> None:
    _check_texts("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    _check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS, "ids")
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    for token_id, bias in params.logit_bias.items():
        _check(
            -100 <= bias <= 100, "logit_bias", f"{bias} for id {token_id}", "must be in [-100, 100]"
        )
    allowed = params.allowed_token_ids
    if allowed is not None:
        _check(
            len(allowed) > 0,
            "allowed_token_ids",
            "empty",
            "at least one id must be allowed; leave it out to allow all",
        )
        _check_count("allowed_token_ids", len(allowed), vocab_size, "ids")
        _check_ids("allowed_token_ids", allowed, vocab_size)


def _check_grammar(params: "SamplingParams") -> None:
    given = [field for field in FIELDS if getattr(params, field) is not None]
    if not given:
        return
    _check(
        len(given) == 1, given[-1], "given", f"a text can obey one grammar, and {given[0]} is, too"
    )
    grammar = grammar_of(params)
    assert grammar is not None
    _check(
        len(grammar.text) <= MAX_GRAMMAR_LENGTH,
        grammar.kind,
        f"{len(grammar.text)} characters",
        f"at most {MAX_GRAMMAR_LENGTH} are allowed for a grammar",
    )
    if params.choice is not None:
        _check(len(params.choice) > 0, "choice", "empty", "at least one text must be there")
        _check_texts("choice", params.choice, MAX_GRAMMAR_LENGTH, MAX_GRAMMAR_LENGTH)
    _check(
        not params.ignore_eos,
        "ignore_eos",
        "true",
        f"nothing can follow a text that {grammar.kind} ends; leave one of them out",
    )


def _check_answer(params: "SamplingParams") -> None:
    _check(1 <= params.n <= MAX_CHOICES, "n", params.n, f"must be from 1 to {MAX_CHOICES}")
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        _check(
            value is None or 0 <= value <= MAX_LOGPROBS,
            field,
            value,
            f"must be from 0 to {MAX_LOGPROBS}: so many of the likeliest tokens are told",
        )


def _check_texts(field: str, texts: list[str], most: int, longest: int) -> None:
    _check_count(field, len(texts), most, "strings")
    for text in texts:
        _check(text != "", field, '""', "must not hold an empty string")
        _check(
            len(text) <= longest,
            field,
            f"{len(text)} characters",
            f"at most {longest} are allowed for a string",
        )


def _check_count(field: str, count: int, most: int, what: str) -> None:
    _check(count <= most, field, f"{count} {what}", f"at most {most} are allowed")


def _check_ids(field: str, ids: "list[int] | dict[int, float]", vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"{field} is {wrong}: ids of this model are 0 to {vocab_size - 1}", field
        )


def _check(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field} is {value}: {rule}", field)
