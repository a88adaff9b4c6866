"""Filling in the middle: the suffix of /v1/completions, and llama.cpp's /infill."""

import json
from typing import Any

import pytest

from quadriga.server.model_info import FillFormat, fill_format_to_info
from tests.unit.http.calls import answer_of
from tests.unit.scripted_ring import ScriptedRing

MARKS = FillFormat(
    prefix="<P>", suffix="<S>", middle="<M>", file="<F>", repository="<R>", stop_token_ids=[7, 9]
)
FILLING = {"fill_format": fill_format_to_info(MARKS)}
GAP = {"input_prefix": "def f(", "input_suffix": "):"}


def test_a_suffix_is_written_with_the_models_marks_whose_tokens_end_the_answer() -> None:
    ring = ScriptedRing(["a, b"], **FILLING)
    body = {"prompt": ["x", "y"], "suffix": "z", "stop_token_ids": [3]}
    assert answer_of(ring, "/v1/completions", body).body["choices"][1]["text"] == "a, b"
    assert [prompt for prompt, _, _ in ring.submitted] == ["<P>x<S>z<M>", "<P>y<S>z<M>"]
    assert ring.submitted[0][1].stop_token_ids == [3, 7, 9]


@pytest.mark.parametrize(
    ("facts", "body", "said"),
    [
        ({}, {"prompt": "x"}, "tiny has no tokens for prefix, suffix and middle"),
        (FILLING, {"prompt": [1, 2]}, "prompt has token ids"),
        (FILLING, {"prompt": "x", "echo": True}, "leave one out"),
    ],
)
def test_a_suffix_that_cannot_be_used_is_a_400(
    facts: dict[str, Any], body: dict[str, Any], said: str
) -> None:
    ring = ScriptedRing(["a"], **facts)
    answer = answer_of(ring, "/v1/completions", {"suffix": "z"} | body)
    error = answer.body["error"]
    assert answer.status == 400 and said in error["message"] and error["param"] == "suffix"


def test_infill_answers_as_llama_cpp_does() -> None:
    ring = ScriptedRing(["a,", " b"], **FILLING)
    body = GAP | {
        "prompt": "self, ", "n_predict": -1, "seed": -1, "repeat_penalty": 1.5,
        "logit_bias": [[5, False], [6, 2]], "input_extra": [{"filename": "a.py", "text": "A = 1"}],
        "samplers": ["top_k"], "cache_prompt": True, "t_max_predict_ms": 500,
    }  # fmt: skip
    answer = answer_of(ring, "/infill", body).body
    assert answer["content"] == "a, b" and answer["stop"] is True
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (2, 3)
    assert answer["stop_type"] == "eos" and answer["timings"]["predicted_n"] == 2
    prompt, params, _ = ring.submitted[0]
    assert prompt == "<R>repository\n<F>a.py\nA = 1\n<F>file\n<P>def f(<S>):<M>self, "
    assert params.max_new_tokens is None and params.seed is None
    assert params.repetition_penalty == 1.5 and params.logit_bias == {5: -100.0, 6: 2.0}


def test_props_has_the_limits_that_clients_of_llama_cpp_read() -> None:
    ring = ScriptedRing([], context_length=4096, max_running_requests=8)
    answer = answer_of(ring, "/props").body
    assert answer["default_generation_settings"]["n_ctx"] == 4096 and answer["total_slots"] == 8
    assert answer["model_alias"] == answer["model_path"] == "tiny"
    assert answer["modalities"] == {"vision": False, "audio": False}
    assert answer["build_info"].startswith("quadriga ")
    assert answer_of(ring, "/props?model=other").status == 404


def test_infill_returns_the_fields_that_are_asked_for() -> None:
    fields = ["content", "timings/prompt_n", "nothing/at/all"]
    ring = ScriptedRing(["a"], **FILLING)
    answer = answer_of(ring, "/infill", GAP | {"response_fields": fields})
    assert answer.body == {"content": "a", "timings/prompt_n": 3}


def test_infill_streams_events_whose_last_has_the_numbers() -> None:
    answer = answer_of(ScriptedRing(["a,", " b"], **FILLING), "/infill", GAP | {"stream": True})
    parts = answer.text.split("\n\n")[:-1]
    events = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert [part["content"] for part in events] == ["a,", " b", ""]
    assert [part["stop"] for part in events] == [False, False, True]
    assert events[-1]["tokens_predicted"] == 2


@pytest.mark.parametrize(
    ("facts", "body", "said"),
    [
        ({}, GAP, "<|fim_prefix|>"),
        (FILLING, GAP | {"beams": 2}, "beams is not a field"),
        (FILLING, {"input_prefix": "a"}, "input_suffix is missing"),
        (FILLING, GAP | {"logit_bias": {"a": 1}}, "no token id"),
        (FILLING, GAP | {"grammar": "root ::= x", "json_schema": {}}, "leave one out"),
    ],
)
def test_errors_of_infill_have_llama_cpps_format(
    facts: dict[str, Any], body: dict[str, Any], said: str
) -> None:
    answer = answer_of(ScriptedRing(["a"], **facts), "/infill", body)
    error = answer.body["error"]
    assert answer.status == error["code"] == 400 and said in error["message"]


def test_a_failure_is_the_last_event_of_infill() -> None:
    ring = ScriptedRing(["a"], **FILLING, leaves_open=True)
    answer = answer_of(ring, "/infill", GAP | {"stream": True})
    assert answer.status == 200 and "worker_proc died" in answer.text
