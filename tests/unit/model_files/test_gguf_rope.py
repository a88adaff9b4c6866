"""Rotary scaling in a GGUF becomes the parameters of the checkpoint it was made from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from quadriga.errors import ModelError
from quadriga.model_files.config.rope_config import RopeScaling
from quadriga.model_files.gguf.reader import read_header
from quadriga.model_files.gguf_header import rope_divisors_of
from quadriga.model_files.gguf_rope import rope_scaling
from worker_proc.models.rope_scaling import rope_frequencies

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


def test_a_file_without_scaling_has_no_parameters() -> None:
    assert rope_scaling({"context_length": CONTEXT}, {}) == {}


def test_divisors_beside_yarn_are_refused() -> None:
    values = {"context_length": CONTEXT, "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    with pytest.raises(ModelError, match=r"'yarn' is not supported together with rope_freqs"):
        rope_scaling(values, {"rope_freqs.weight": [1.0]})
