"""Rotary scaling in a GGUF becomes the parameters of the checkpoint it was made from."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from quadriga.errors import ModelError
from quadriga.server.models.families.decoder_config import RopeScaling
from quadriga.server.models.formats.gguf_config import (
    LONG_FACTORS,
    ROPE_FREQS,
    SHORT_FACTORS,
    rope_divisors_of,
    rope_scaling,
)
from quadriga.server.models.formats.gguf_reader import read_header
from worker_proc.models.decoder import rope_frequencies

HEAD_DIM, CONTEXT, ORIGINAL = 16, 256, 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}


def scaling_of(part: dict[str, Any]) -> RopeScaling:
    return RopeScaling.from_hf({"max_position_embeddings": CONTEXT, **part}, HEAD_DIM)


def test_the_divisors_of_llama_3_give_the_frequencies_of_its_config(tmp_path: Path) -> None:
    expected, factor = rope_frequencies(scaling_of({"rope_parameters": LLAMA3}), CONTEXT)
    divisors = rope_frequencies(scaling_of({}), CONTEXT)[0] / expected
    writer = GGUFWriter(tmp_path / "llama3.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = rope_divisors_of(tmp_path / "llama3.gguf", read_header(tmp_path / "llama3.gguf"))
    scaling = scaling_of(rope_scaling({"context_length": CONTEXT}, read))
    for context in (ORIGINAL, CONTEXT):
        frequencies, attention_factor = rope_frequencies(scaling, context)
        torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
        assert attention_factor == factor


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_types_with_a_factor_give_the_frequencies_of_their_config(kind: str) -> None:
    values = {
        "context_length": CONTEXT,
        "rope.scaling.type": kind,
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": ORIGINAL,
    }
    parameters = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    ours, factor = rope_frequencies(scaling_of(rope_scaling(values, {})), CONTEXT)
    theirs = scaling_of({"rope_parameters": parameters})
    expected, expected_factor = rope_frequencies(theirs, CONTEXT)
    assert torch.equal(ours, expected)
    assert factor == expected_factor


TWO = [2.0] * (HEAD_DIM // 2)
PAIRS = [1.0 + 0.4 * pair for pair in range(HEAD_DIM // 2)]
MAGNITUDE = 0.1 * math.log(4.0) + 1.0  # of YaRN with a factor of 4
SIZES = {"context_length": CONTEXT, "embedding_length": 4 * HEAD_DIM, "attention.head_count": 4}


def listed(divisors: list[float], attention_factor: float = 1.0) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": attention_factor,
    }


@pytest.mark.parametrize(
    ("keys", "divisors", "expected"),
    [
        ({"factor": 4.0}, None, {"rope_type": "linear", "factor": 4.0}),
        ({"linear": 4.0}, None, {"rope_type": "linear", "factor": 4.0}),
        ({"linear": 4.0, "factor": 2.0}, None, {"rope_type": "linear", "factor": 2.0}),
        ({"linear": 4.0, "factor": 0.0}, None, {"rope_type": "default"}),
        ({"factor": 0.0}, None, {"rope_type": "default"}),
        ({"type": "none", "factor": 4.0}, None, {"rope_type": "default"}),
        ({"type": "none", "linear": 4.0}, None, {"rope_type": "default"}),
        ({"type": "linear"}, None, {"rope_type": "default"}),
        ({"type": "yarn", "linear": 4.0}, None, {"rope_type": "yarn", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "attn_factor": 1.5},
            None,
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5 * MAGNITUDE},
        ),
        ({"attn_factor": 1.5}, None, listed([1.0] * (HEAD_DIM // 2), 1.5)),
        ({"attn_factor": 1.5, "factor": 2.0}, None, listed(TWO, 1.5)),
        ({}, PAIRS, listed(PAIRS)),
        ({"factor": 2.0}, PAIRS, listed([2 * divisor for divisor in PAIRS])),
        ({"type": "none", "factor": 2.0}, PAIRS, listed(PAIRS)),
        ({"attn_factor": 1.5}, PAIRS, listed(PAIRS, 1.5)),
    ],
)
def test_keys_of_scaling_mean_what_llama_cpp_takes_them_for(
    keys: dict[str, Any], divisors: list[float] | None, expected: dict[str, Any]
) -> None:
    names = {"linear": "rope.scale_linear"}
    values = SIZES | {names.get(key, f"rope.scaling.{key}"): value for key, value in keys.items()}
    tensors = {} if divisors is None else {ROPE_FREQS: divisors}
    ours, factor = rope_frequencies(scaling_of(rope_scaling(values, tensors)), CONTEXT)
    theirs = scaling_of({"rope_parameters": expected})
    expected_frequencies, expected_factor = rope_frequencies(theirs, CONTEXT)
    torch.testing.assert_close(ours, expected_frequencies, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_a_factor_divides_the_frequencies_of_longrope_as_well() -> None:
    values = SIZES | {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}
    values["rope.scaling.original_context_length"] = ORIGINAL
    lists = {SHORT_FACTORS: [1.0] * (HEAD_DIM // 2), LONG_FACTORS: PAIRS}
    scaling = scaling_of(rope_scaling(values, lists))
    unscaled = rope_frequencies(scaling_of({}), CONTEXT)[0]
    torch.testing.assert_close(rope_frequencies(scaling, ORIGINAL)[0], unscaled / 2)
    expected = unscaled / (2 * torch.tensor(PAIRS))
    torch.testing.assert_close(rope_frequencies(scaling, CONTEXT)[0], expected)


@pytest.mark.parametrize("factor", [-2.0, math.inf, math.nan])
def test_a_factor_that_is_no_number_above_0_is_refused(factor: float) -> None:
    with pytest.raises(ModelError, match=r"rope\.scaling\.factor = .* numbers above 0"):
        rope_scaling(SIZES | {"rope.scaling.factor": factor}, {})


def test_a_file_without_scaling_has_no_parameters() -> None:
    assert rope_scaling({"context_length": CONTEXT}, {}) == {}


def test_divisors_beside_yarn_are_refused() -> None:
    values = {"context_length": CONTEXT, "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    with pytest.raises(ModelError, match=r"'yarn' is not supported together with rope_freqs"):
        rope_scaling(values, {"rope_freqs.weight": [1.0]})
