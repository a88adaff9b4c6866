"""The table of parameter ranges, and what is made from it."""

import re
from pathlib import Path

import pytest

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import LIMITS, Range, SamplingParams
from quadriga.sampling.validation import check_counts, check_number, validate_params

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "sampling.md"


def ranges_in_the_document() -> dict[str, str]:
    """Read the first two columns of every table of parameters."""
    return dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE))


def as_in_the_document(limit: Range) -> str:
    """Return a range as docs/sampling.md writes it."""
    parts = []
    if limit.max_items is not None:
        parts.append(f"{limit.max_items:,} {limit.items}")
    if limit.max_chars is not None:
        parts.append(f"{limit.max_chars:,} characters")
    if limit.minimum is not None:
        parts.append(numbers(limit.minimum, limit.maximum, limit.excludes_minimum))
    return " of ".join(parts)


def numbers(minimum: float, maximum: float | None, excludes_minimum: bool) -> str:
    """Return the numbers of a range; a large bound is a power of two."""
    if maximum is None:
        return f"≥ {minimum}"
    if excludes_minimum:
        return f"({minimum}, {maximum}]"
    bits = int(maximum).bit_length()
    return f"{minimum} to " + (f"2^{bits} - 1" if bits > 30 else f"{maximum:,}")


def test_the_document_has_the_range_of_every_sampling_parameter() -> None:
    ranges = ranges_in_the_document()
    assert ranges.keys() == set(SamplingParams.__struct_fields__)
    for field in ranges.keys() & LIMITS.keys():
        assert as_in_the_document(LIMITS[field]) in ranges[field], field


@pytest.mark.parametrize(
    ("field", "number", "message"),
    [
        ("priority", 1001, "priority is 1001: must be from -1000 to 1000"),
        ("top_p", 0, r"top_p is 0: must be in \(0, 1\]; 1 is off"),
        ("max_new_tokens", 0, "max_new_tokens is 0: must be at least 1"),
        ("repetition_penalty", 0, "must be from 0.001 to 2; 1 is off"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_its_limits(
    field: str, number: float, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_number(field, number)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["stop", "stop_regex", "bad_words", "stop_token_ids"])
def test_a_list_may_be_as_long_as_its_limit(field: str) -> None:
    most = LIMITS[field].max_items
    assert most is not None
    check_counts({field: ["a"] * most})
    with pytest.raises(InvalidRequest, match=f"{field} is {most + 1} .*at most {most} are allowed"):
        check_counts({field: ["a"] * (most + 1)})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={1: 100.5}),
        SamplingParams(min_new_tokens=5, max_new_tokens=4),
        SamplingParams(allowed_token_ids=[]),
        SamplingParams(regex="a", ebnf="b"),
        SamplingParams(choice=[]),
        SamplingParams(choice=["a", ""]),
        SamplingParams(regex="a", ignore_eos=True),
        SamplingParams(regex="a" * 200_000),
    ],
)
def test_parameters_that_contradict_each_other_or_are_empty_are_refused(
    params: SamplingParams,
) -> None:
    with pytest.raises(InvalidRequest):
        validate_params(params, vocab_size=10)
