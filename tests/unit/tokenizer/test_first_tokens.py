"""Answers that begin with given tokens: what is refused, and what the scheduler is sent."""

from array import array
from typing import Any

import pytest

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.validation import validate_params
from tests.unit.tokenizer.frontend_world import VOCAB, model
from tokenizer_proc.preparation.validation import fit


def fitted(**fields: Any) -> SamplingParams:
    _, params = fit(array("i", [5]), SamplingParams(**fields), model(), 8, False)
    return params


def test_they_are_within_the_vocabulary() -> None:
    validate_params(SamplingParams(first_token_ids=[0, VOCAB - 1]), VOCAB)
    for wrong in (-1, VOCAB):
        with pytest.raises(InvalidRequest, match=f"first_token_ids holds {wrong}: ids of this"):
            validate_params(SamplingParams(first_token_ids=[3, wrong]), VOCAB)


@pytest.mark.parametrize("limit", [{"max_new_tokens": 3}, {}])
def test_at_least_one_token_follows_them(limit: dict[str, int]) -> None:
    most = limit.get("max_new_tokens", 8)
    assert fitted(first_token_ids=[5] * (most - 1), **limit).max_new_tokens == most
    with pytest.raises(InvalidRequest, match=f"is {most}: .*ask for at least {most + 1}") as raised:
        fitted(first_token_ids=[5] * most, **limit)
    assert raised.value.field == "max_new_tokens"


def test_no_stop_token_is_among_them() -> None:
    eos = min(model().eos_token_ids)
    for fields in (
        {"stop_token_ids": [8], "first_token_ids": [5, 8, 6]},
        {"first_token_ids": [5, eos]},
    ):
        with pytest.raises(InvalidRequest, match=r"as its token 2 of \d, .* at most 1 tokens"):
            fitted(**fields)
    fitted(first_token_ids=[5, eos], ignore_eos=True)
