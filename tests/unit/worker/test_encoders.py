"""Encoders: hidden states of transformers, without padding, and equal bits in any batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from quadriga.errors import ModelError
from quadriga.sampling.pooling import CLS, LAST, MEAN, Pooling
from quadriga.server.models.families.architectures import read_architecture
from tests.tiny_encoders import (
    CONTEXT_LENGTH,
    ENCODERS,
    MODERNBERT_FIRST_NAMES,
    tiny_bert,
    tiny_embedding_gemma,
    tiny_modernbert,
)
from tests.unit.worker.vectors import vectors_of
from tests.unit.worker_driver import prompts_of, runner_of
from worker_proc.models.position_bias import bucket_of

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
    errors = []
    for prompt, mean, first in zip(prompts, means, firsts, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        errors += [np.abs(mean - states.mean(0)).max(), np.abs(first - states[0]).max()]
    print(f"{family}, {backend}: the largest error is {max(errors):.1e}")
    assert max(errors) < 2e-5


@pytest.mark.parametrize(
    ("dtype", "quantization", "least"),
    [("float32", "none", 0.9999), ("bfloat16", "none", 0.999), ("bfloat16", "int8", 0.999)],
)
@pytest.mark.parametrize("family", list(ENCODERS))
def test_vectors_in_fewer_bits_are_nearly_those_of_transformers(
    family: str, dtype: str, quantization: str, least: float, tmp_path: Path
) -> None:
    directory = ENCODERS[family](tmp_path / "model")
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = prompts_of(LENGTHS)
    runner = runner_of(
        directory, attention_backend="native", page_size=16, dtype=dtype, quantization=quantization
    )
    cosines = []
    for prompt, vector in zip(
        prompts, vectors_of(runner, prompts, Pooling(MEAN, whole=True)), strict=True
    ):
        with torch.inference_mode():
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(0).numpy()
        cosines.append(float(vector @ mean / np.linalg.norm(mean)))
    print(f"{family}, {dtype}, {quantization}: the least cosine is {min(cosines):.6f}")
    assert min(cosines) >= least


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("family", ["bert", "gemma3_text", "modernbert", "mpnet"])
def test_bits_do_not_depend_on_the_batch(
    family: str, dtype: str, page_size: int, tmp_path: Path
) -> None:
    runner = runner_of(
        ENCODERS[family](tmp_path / "model"), attention_backend="native", dtype=dtype,
        page_size=page_size,
    )  # fmt: skip
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


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet"])
def test_what_an_earlier_text_left_in_a_page_does_not_matter(family: str, tmp_path: Path) -> None:
    runner = runner_of(
        ENCODERS[family](tmp_path / "model"), attention_backend="native", page_size=16
    )
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


def test_the_first_config_of_modernbert_says_the_same_in_other_names(tmp_path: Path) -> None:
    first = json.loads((tiny_modernbert(tmp_path / "model") / "config.json").read_text())
    kinds = ("full_attention", "sliding_attention")
    newer = {name: value for name, value in first.items() if name not in MODERNBERT_FIRST_NAMES}
    newer["layer_types"] = [kinds[bool(number % 3)] for number in range(5)]
    newer["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in zip(kinds, (160000.0, 10000.0), strict=True)
    }
    one, other = read_architecture(first), read_architecture(newer)
    assert one == other
    assert one.windows == (None, 11, 11, None, 11)
    for changes, message in (
        ({"classifier_pooling": "max"}, "classifier_pooling = 'max'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"local_attention": -1}, "local_attention = -1"),
        ({"is_decoder": True}, "is_decoder = True"),
    ):
        head = {"architectures": ["ModernBertForSequenceClassification"]}
        with pytest.raises(ModelError, match=message):
            read_architecture(first | head | changes)


def test_distances_have_the_buckets_of_transformers() -> None:
    distances = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(distances, num_buckets=32)
    assert torch.equal(bucket_of(distances, 32), expected)
    assert len(expected.unique()) == 31, "no token after another one has the distance 0"


def test_an_mpnet_with_other_buckets_than_it_was_trained_with_is_refused(tmp_path: Path) -> None:
    config = json.loads((ENCODERS["mpnet"](tmp_path / "model") / "config.json").read_text())
    with pytest.raises(ModelError, match="relative_attention_num_buckets = 64"):
        read_architecture(config | {"relative_attention_num_buckets": 64})


@pytest.mark.parametrize("family", ["gemma3_text", "modernbert"])
def test_a_layer_sees_no_further_than_its_window(family: str, tmp_path: Path) -> None:
    """A token changes vectors as far as windows reach, on both sides, if no layer sees all."""
    types = ["sliding_attention"] * 2
    options = {"num_hidden_layers": 2, "layer_types": types}
    directory = {"gemma3_text": tiny_embedding_gemma, "modernbert": tiny_modernbert}[family](
        tmp_path / "model", **options
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"layer_types": types}))
    window = read_architecture(config | {"layer_types": types}).windows[0]
    assert window is not None
    reach = 2 * (window - 1)
    (prompt,) = prompts_of([CONTEXT_LENGTH], seed=8)
    for backend in ("torch", "native"):
        runner = runner_of(directory, attention_backend=backend, page_size=16)
        for place in (reach, reach + 1):
            changed = [*prompt]
            changed[place] += 1
            firsts = vectors_of(runner, [prompt, changed], Pooling(CLS, whole=True))
            assert (firsts[0].tobytes() == firsts[1].tobytes()) == (place > reach), backend
            changed = [*prompt]
            changed[-1 - place] += 1
            lasts = vectors_of(runner, [prompt, changed], Pooling(LAST, whole=True))
            assert (lasts[0].tobytes() == lasts[1].tobytes()) == (place > reach), backend
