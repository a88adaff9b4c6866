"""Modules Dense over pooled vectors: in float32, of the whole vector, before it is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from quadriga.errors import ModelError
from quadriga.sampling.pooling import MEAN, Pooling
from tests.tiny_encoders import CONTEXT_LENGTH, tiny_embedding_gemma
from tests.tiny_modules import write_modules
from tests.unit.worker.vectors import vectors_of
from tests.unit.worker_driver import prompts_of, runner_of

# As of google/embeddinggemma-300m, and a module with a bias and an activation before them.
MODULES: list[dict[str, Any]] = [
    {"in_features": 48, "out_features": 40},
    {"in_features": 40, "out_features": 100, "bias": False,
     "activation_function": "torch.nn.modules.linear.Identity"},
    {"in_features": 100, "out_features": 48, "bias": False,
     "activation_function": "torch.nn.modules.linear.Identity"},
]  # fmt: skip
LENGTHS = [1, 2, 17, CONTEXT_LENGTH]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tiny_embedding_gemma(tmp_path / "model")
    write_modules(path, MODULES)
    return path


def expected(directory: Path, prompt: list[int]) -> np.ndarray:
    """Return the vector of a prompt by transformers and torch, which is not normalized."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        vector = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        for number in range(len(MODULES)):
            stored = load_file(directory / f"{number + 2}_Dense" / "model.safetensors")
            vector = stored["linear.weight"] @ vector
            vector = (vector + stored["linear.bias"]).tanh() if "linear.bias" in stored else vector
    return np.asarray(vector)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_vectors_are_those_of_the_modules_in_their_order(backend: str, directory: Path) -> None:
    runner = runner_of(directory, attention_backend=backend)
    prompts = prompts_of(LENGTHS)
    plain = vectors_of(runner, prompts, Pooling(MEAN, normalize=False, whole=True))
    short = vectors_of(runner, prompts, Pooling(MEAN, dimensions=8, whole=True))
    for prompt, vector, first in zip(prompts, plain, short, strict=True):
        wanted = expected(directory, prompt)
        np.testing.assert_allclose(vector, wanted, atol=2e-5)
        np.testing.assert_allclose(first, wanted[:8] / np.linalg.norm(wanted[:8]), atol=2e-5)


def test_bits_do_not_depend_on_the_batch(directory: Path) -> None:
    runner = runner_of(directory, attention_backend="native", dtype="bfloat16")
    prompts = prompts_of([1, 2, 17, 17, 40, CONTEXT_LENGTH], seed=4)
    pooling = Pooling(MEAN, whole=True)
    together = vectors_of(runner, prompts, pooling)
    for prompt, vector in zip(prompts, together, strict=True):
        (alone,) = vectors_of(runner, [prompt], pooling)
        assert alone.tobytes() == vector.tobytes()


def test_a_module_whose_tensors_are_others_is_refused_with_its_path(directory: Path) -> None:
    file = directory / "3_Dense" / "model.safetensors"
    save_file({"linear.weight": torch.zeros(3, 4)}, file)
    with pytest.raises(ModelError, match=r"3_Dense/model\.safetensors has the tensors .*\[3, 4\]"):
        runner_of(directory)
    file.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"cannot read .*3_Dense/model\.safetensors"):
        runner_of(directory)
    file.unlink()
    with pytest.raises(ModelError, match=r"3_Dense has no model\.safetensors"):
        runner_of(directory)
