"""Encoders: hidden states of transformers, without padding, and equal bits in any batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from quadriga.errors import ModelError
from quadriga.sampling.pooling import CLS, MEAN, Pooling
from quadriga.server.models.families.architectures import read_architecture
from tests.tiny_encoders import CONTEXT_LENGTH, ENCODERS, tiny_bert
from tests.unit.worker.vectors import vectors_of
from tests.unit.worker_driver import prompts_of, runner_of

# Of one token, of more than a block of keys, and the whole context.
LENGTHS = [1, 2, 17, 63, 64, 65, CONTEXT_LENGTH]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("family", list(ENCODERS))
def test_vectors_are_those_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    directory = ENCODERS[family](tmp_path / "model")
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = prompts_of(LENGTHS)
    runner = runner_of(directory, attention_backend=backend, page_size=16)
    means = vectors_of(runner, prompts, Pooling(MEAN, normalize=False, whole=True))
    firsts = vectors_of(runner, prompts, Pooling(CLS, normalize=False, whole=True))
    for prompt, mean, first in zip(prompts, means, firsts, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(mean, states.mean(0), atol=2e-5)
        np.testing.assert_allclose(first, states[0], atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [4, 16])
def test_bits_do_not_depend_on_the_batch(dtype: str, page_size: int, tmp_path: Path) -> None:
    runner = runner_of(
        tiny_bert(tmp_path / "model"), attention_backend="native", dtype=dtype, page_size=page_size
    )
    prompts = prompts_of([1, 2, 17, 17, 40, 96], seed=4)
    pooling = Pooling(MEAN, whole=True)
    together = vectors_of(runner, prompts, pooling)
    other_order = vectors_of(runner, prompts[::-1], pooling)[::-1]
    for prompt, first, second in zip(prompts, together, other_order, strict=True):
        (alone,) = vectors_of(runner, [prompt], pooling)
        assert alone.tobytes() == first.tobytes() == second.tobytes()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_give_nearly_the_same_vectors(quantization: str, tmp_path: Path) -> None:
    directory = tiny_bert(tmp_path / "model", hidden_size=64, num_attention_heads=2)
    prompts = prompts_of([3, 40], seed=5)
    pooling = Pooling(MEAN, whole=True)
    exact = vectors_of(runner_of(directory, attention_backend="native"), prompts, pooling)
    rounded = vectors_of(
        runner_of(directory, attention_backend="native", dtype="bfloat16",
                  quantization=quantization),
        prompts,
        pooling,
    )  # fmt: skip
    least = {"int8": 0.999, "int4": 0.95}[quantization]
    assert all(one @ other > least for one, other in zip(exact, rounded, strict=True))


def test_what_an_earlier_text_left_in_a_page_does_not_matter(tmp_path: Path) -> None:
    runner = runner_of(tiny_bert(tmp_path / "model"), attention_backend="native", page_size=16)
    prompt, *others = prompts_of([5, 90, 90, 90], seed=6)
    pooling = Pooling(MEAN, whole=True)
    (before,) = vectors_of(runner, [prompt], pooling)
    vectors_of(runner, others, pooling)
    for layer in runner.engine.kv_parts():
        layer.view(torch.uint8).fill_(0xFF)  # NaN
    (after,) = vectors_of(runner, [prompt], pooling)
    assert before.tobytes() == after.tobytes()


def test_the_first_config_of_nomic_bert_says_the_same_in_other_names() -> None:
    shared = {"model_type": "nomic_bert", "vocab_size": 512, "type_vocab_size": 2}
    first = {
        "n_embd": 48, "n_head": 3, "n_inner": 80, "n_layer": 2, "n_positions": 96,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu", "qkv_proj_bias": False, "prenorm": False, "causal": False,
    }  # fmt: skip
    newer = {
        "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 80,
        "num_hidden_layers": 2, "max_position_embeddings": 96, "layer_norm_eps": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "hidden_act": "silu",
    }  # fmt: skip
    one, other = read_architecture(shared | first), read_architecture(shared | newer)
    assert one == other
    with pytest.raises(ModelError, match="prenorm = True"):
        read_architecture(shared | first | {"prenorm": True})
