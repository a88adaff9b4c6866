"""Checks a request's parameters against `LIMITS`, and against each other."""

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import GRAMMAR_FIELDS, LIMITS, SamplingParams, grammar_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NO_TEXTS: Mapping[int, str] = {}
MAX_TOKENS_SHOWN = 5
MAX_DIGITS_SHOWN = 40
_NUMBERS = [
    field
    for field in SamplingParams.__struct_fields__
    if field in LIMITS and LIMITS[field].minimum is not None and LIMITS[field].max_items is None
]
_LISTS = [field for field in LIMITS if LIMITS[field].max_items is not None]


def check_counts(values: Mapping[str, Any]) -> None:
    """Check the lengths of lists and maps before their items are read.

    Args:
        values: untyped values by the names of SamplingParams' fields.

    Raises:
        InvalidRequest: a list or a map is too long.
    """
    for field in _LISTS:
        if isinstance(value := values.get(field), list | dict):
            _check_count(field, value)


def check_number(field: str, number: float) -> None:
    """Raise InvalidRequest if the number is out of its field's range."""
    limit = LIMITS[field]
    if not limit.contains(number):
        raise InvalidRequest(f"{field} is {shown_number(number)}: {limit.rule}", field)


def check_numbers(params: SamplingParams) -> None:
    """Raise InvalidRequest for the first number out of its range; 0 new tokens are in it."""
    for field in _NUMBERS:
        number = getattr(params, field)
        if number is not None and not (field == "max_new_tokens" and number == 0):
            check_number(field, number)


def shown_number(number: float) -> str:
    """Return a number for an error message; of a very large integer the number of its digits."""
    if isinstance(number, int) and abs(number) >= 10**MAX_DIGITS_SHOWN:
        # Python writes no integer of more than 4,300 digits.
        num_digits = round(number.bit_length() * math.log10(2))
        return f"a {'negative ' if number < 0 else ''}number of about {num_digits} digits"
    return str(number)


def validate_params(
    params: SamplingParams, vocab_size: int, texts: Mapping[int, str] = NO_TEXTS
) -> None:
    """Raise InvalidRequest for the first value out of its range.

    Args:
        params: the parameters.
        vocab_size: number of ids of the model.
        texts: the tokenizer's tokens that the model does not have, by id, for the error.
    """
    for field in _NUMBERS:
        number = getattr(params, field)
        if number is not None:
            check_number(field, number)
    most, least = params.max_new_tokens, params.min_new_tokens
    _check(
        most is None or least <= most,
        "min_new_tokens",
        least,
        f"must not be above max_new_tokens, which is {most}",
    )
    _check_texts("stop", params.stop_strings)
    _check_texts("stop_regex", params.stop_regexes)
    _check_texts("bad_words", params.bad_words)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size, texts)
    _check_ids("logit_bias", params.logit_bias, vocab_size, texts)
    for token_id, bias in params.logit_bias.items():
        limit = LIMITS["logit_bias"]
        _check(limit.contains(bias), "logit_bias", f"{bias} for id {token_id}", limit.rule)
    _check_ids("logprob_token_ids", params.logprob_token_ids, vocab_size, texts)
    check_token_ids("first_token_ids", params.first_token_ids, vocab_size, texts)
    _check_thinking(params)
    if params.allowed_token_ids is not None:
        _check_allowed_ids(params.allowed_token_ids, vocab_size, texts)
    _check_grammar(params)


def _check_allowed_ids(allowed: list[int], vocab_size: int, texts: Mapping[int, str]) -> None:
    field = "allowed_token_ids"
    rule = "at least one id must be allowed; leave it out to allow all"
    _check(len(allowed) > 0, field, "empty", rule)
    count = len(allowed)
    _check(count <= vocab_size, field, f"{count} ids", f"at most {vocab_size} are allowed")
    _check_ids(field, allowed, vocab_size, texts)


def _check_grammar(params: SamplingParams) -> None:
    given = [field for field in GRAMMAR_FIELDS if getattr(params, field) is not None]
    if not given:
        return
    rule = f"a text can obey one grammar, and {given[0]} is given, too"
    _check(len(given) == 1, given[-1], "given", rule)
    grammar = grammar_of(params)
    assert grammar is not None
    most = LIMITS[grammar.kind].max_chars
    assert most is not None
    rule = f"at most {most} are allowed for a grammar"
    _check(len(grammar.text) <= most, grammar.kind, f"{len(grammar.text)} characters", rule)
    if params.choice is not None:
        _check(len(params.choice) > 0, "choice", "empty", "at least one text must be given")
        _check("" not in params.choice, "choice", '""', "must not hold an empty string")
    rule = f"nothing can follow a text that {grammar.kind} ends; leave one of them out"
    _check(not params.ignore_eos, "ignore_eos", "true", rule)


def _check_thinking(params: SamplingParams) -> None:
    for field in ("thinking_end", "thinking_start"):
        mark, most = getattr(params, field), LIMITS[field].max_chars
        assert most is not None
        rule = f"at most {most} are allowed"
        _check(len(mark) <= most, field, f"{len(mark)} characters", rule)
        rule = "it must be empty, or have more than whitespace"
        _check(mark == "" or mark.strip() != "", field, repr(mark), rule)
    if params.thinking_end:
        return
    budget = params.thinking_token_budget
    rule = "it limits a reasoning that ends with thinking_end, which is missing"
    _check(budget is None, "thinking_token_budget", budget, rule)
    rule = "it begins a reasoning that ends with thinking_end, which is missing"
    _check(not params.thinking_start, "thinking_start", repr(params.thinking_start), rule)


def _check_texts(field: str, texts: list[str]) -> None:
    _check_count(field, texts)
    most = LIMITS[field].max_chars
    assert most is not None
    for text in texts:
        _check(text != "", field, '""', "must not hold an empty string")
        rule = f"at most {most} are allowed for a string"
        _check(len(text) <= most, field, f"{len(text)} characters", rule)


def _check_count(field: str, values: Collection[Any]) -> None:
    limit = LIMITS[field]
    assert limit.max_items is not None
    rule = f"at most {limit.max_items} are allowed"
    _check(len(values) <= limit.max_items, field, f"{len(values)} {limit.items}", rule)


def _check_ids(field: str, ids: Collection[int], vocab_size: int, texts: Mapping[int, str]) -> None:
    if LIMITS[field].max_items is not None:
        _check_count(field, ids)
    check_token_ids(field, ids, vocab_size, texts)


def check_token_ids(
    field: str, ids: Collection[int], vocab_size: int, texts: Mapping[int, str] = NO_TEXTS
) -> None:
    """Raise InvalidRequest for an id that the model does not have, with its text from `texts`."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        token = f" (the token {texts[wrong]!r})" if wrong in texts else ""
        rule = f"ids of this model are 0 to {vocab_size - 1}"
        raise InvalidRequest(f"{field} holds {shown_number(wrong)}{token}: {rule}", field)


def _check(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field} is {value}: {rule}", field)


class UnservedTokens(NamedTuple):
    """A tokenizer's tokens whose ids the model does not have: no row of its embedding or head.

    Requests that hold one of them are refused, and none of them is ever sampled.

    Attributes:
        vocab_size: number of ids of the model.
        texts: the tokens by their ids, in ascending order.
        added: those that every text has as one token wherever it contains them.
    """

    vocab_size: int
    texts: Mapping[int, str] = NO_TEXTS
    added: Mapping[int, str] = NO_TEXTS

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        """Raise InvalidRequest if the field `name` holds an id that the model does not have."""
        check_token_ids(name, ids, self.vocab_size, self.texts)

    def check_text(self, name: str, text: str) -> None:
        """Raise InvalidRequest if the text of the field `name` contains one of the added tokens."""
        for token_id, token in self.added.items():
            if token in text:
                self.check_ids(name, [token_id])

    @property
    def note(self) -> str:
        """What the start of a server says about the tokens; "" without such tokens."""
        count = len(self.texts)
        if not count:
            return ""
        shown = [f"{text!r} ({token_id})" for token_id, text in self.texts.items()]
        more = f" and {count - MAX_TOKENS_SHOWN} more" if count > MAX_TOKENS_SHOWN else ""
        return (
            f"{count} tokens of the tokenizer have ids that the model, whose ids are 0 to"
            f" {self.vocab_size - 1}, does not have: {', '.join(shown[:MAX_TOKENS_SHOWN])}{more};"
            " requests that contain them are refused"
        )


def find_unserved_tokens(tokenizer: "Tokenizer", vocab_size: int) -> UnservedTokens:
    """Return the tokens of a tokenizer that are beyond the ids of a model with `vocab_size` ids."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    beyond = sorted((i, text) for text, i in vocabulary.items() if i >= vocab_size)
    added = tokenizer.get_added_tokens_decoder()
    return UnservedTokens(
        vocab_size, dict(beyond), {i: text for i, text in beyond if i in added and text}
    )
