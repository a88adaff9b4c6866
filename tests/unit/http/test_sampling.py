"""Sampling fields by all supported names become SamplingParams, or an error that names them."""

from typing import Any

import pytest

from http_proc.core.errors import ApiError, from_server
from http_proc.generation.sampling import CHAT, OPENAI, SGLANG, take_sampling
from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams


def test_every_name_reaches_its_field_and_leaves_the_body() -> None:
    body: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "stop": "x", "seed": 7, "x": 2}
    sampling = take_sampling(body, OPENAI, {"max_new_tokens": 16})
    expected = SamplingParams(max_new_tokens=5, temperature=0.0, stop="x", seed=7)
    assert sampling.params == expected
    assert body == {"x": 2}
    native: dict[str, Any] = {"max_new_tokens": 5, "sampling_seed": 7}
    assert take_sampling(native, SGLANG, {}).params == SamplingParams(max_new_tokens=5, seed=7)


@pytest.mark.parametrize("table", [OPENAI, CHAT, SGLANG])
def test_a_target_of_the_first_token_is_a_field_of_each_api(table: dict[str, str]) -> None:
    assert take_sampling({"ttft_target": 0.25}, table, {}).params.ttft_target == 0.25


def test_the_newer_name_of_the_limit_wins_in_a_chat() -> None:
    body = {"max_completion_tokens": 3, "max_tokens": 9}
    assert take_sampling(dict(body), CHAT, {}).params.max_new_tokens == 3


def test_omitted_parameters_take_the_endpoints_defaults() -> None:
    assert take_sampling({}, OPENAI, {"max_new_tokens": 16}).params.max_new_tokens == 16


@pytest.mark.parametrize("table", [OPENAI, CHAT, SGLANG])
def test_every_field_of_a_table_is_one_of_sampling_params(table: dict[str, str]) -> None:
    assert set(table.values()) <= set(SamplingParams.__struct_fields__)


def test_biased_ids_come_as_json_spells_them() -> None:
    params = take_sampling({"logit_bias": {"7": -100}}, OPENAI, {}).params
    assert params.logit_bias == {7: -100.0}


@pytest.mark.parametrize(
    ("body", "param"),
    [({"max_tokens": "5"}, "max_tokens"), ({"stop": [1]}, "stop"),
     ({"temperature": []}, "temperature"), ({"ignore_eos": 1}, "ignore_eos")],
)  # fmt: skip
def test_a_wrong_type_names_the_field_as_the_request_calls_it(
    body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        take_sampling(body, OPENAI, {})
    assert caught.value.answer.error.param == param


def test_an_error_of_the_ring_speaks_of_the_requests_own_field() -> None:
    error = InvalidRequest("max_new_tokens is 0: must be at least 1", "max_new_tokens")
    api_error = from_server(error, {"max_new_tokens": "max_tokens"})
    assert api_error.answer.error.param == "max_tokens"
    assert str(api_error) == "max_tokens is 0: must be at least 1"
