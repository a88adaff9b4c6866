"""Checkpoints with odd configurations: the same greedy tokens as transformers, in float32.

The configurations are what users write by hand, what other tools and older releases of transformers
write, and values that contradict each other.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.model_impl import ModelImpl, choose_model_impl
from quadriga.server.models.resolve import resolve_model
from tests.references import greedy_of
from tests.tiny_experts import EXPERTS
from tests.tiny_models import FAMILIES
from tests.unit.worker_driver import Driver, prompts_of, runner_of

COUNT = 8
LENGTHS = [17, 40, 90]  # longer than the windows of the tiny models
CHUNK = 32
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"
Tensors = dict[str, torch.Tensor]


def with_own_head(tensors: Tensors, embedding: str, head: str) -> Tensors:
    """Add a head with other values than the embedding's."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(tensors[embedding].shape, generator=generator)
    return {**tensors, head: values * 0.12}


def llama_with_own_head(tensors: Tensors) -> Tensors:
    return with_own_head(tensors, "model.embed_tokens.weight", "lm_head.weight")


def neox_with_own_head(tensors: Tensors) -> Tensors:
    return with_own_head(tensors, "gpt_neox.embed_in.weight", "embed_out.weight")


def with_the_same_head(tensors: Tensors) -> Tensors:
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def with_the_head_only(tensors: Tensors) -> Tensors:
    values = dict(tensors)
    return {"lm_head.weight": values.pop("model.embed_tokens.weight"), **values}


@dataclass(frozen=True)
class Odd:
    """What differs from a family's tiny model.

    Attributes:
        family: Its model_type.
        built: Fields of the configuration that it is built with.
        removed: Keys that are removed from config.json.
        added: Keys of config.json that are added or replaced.
        stored: Changes the stored tensors.
    """

    family: str
    built: dict[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    added: dict[str, Any] = field(default_factory=dict)
    stored: Callable[[Tensors], Tensors] | None = None

    def write(self, directory: Path) -> Path:
        """Write the checkpoint, and return its directory."""
        {**FAMILIES, **EXPERTS}[self.family](directory, **self.built)
        file = directory / "config.json"
        config = json.loads(file.read_text())
        kept = {key: value for key, value in config.items() if key not in self.removed}
        file.write_text(json.dumps(kept | self.added))
        if self.stored is not None:
            weights = directory / "model.safetensors"
            save_file(self.stored(load_file(weights)), weights, {"format": "pt"})
        return directory


ROPE = ("rope_parameters",)
ODD = {
    "llama: tied, with another head stored": Odd("llama", stored=llama_with_own_head),
    "llama: tied, with the same head stored": Odd("llama", stored=with_the_same_head),
    "llama: tied, with the head stored only": Odd("llama", stored=with_the_head_only),
    "gemma2: tied, with another head stored": Odd("gemma2", stored=llama_with_own_head),
    "gemma3_text: not tied": Odd("gemma3_text", {"tie_word_embeddings": False}),
    "gpt_neox: tied, with another head stored": Odd(
        "gpt_neox", added={"tie_word_embeddings": True}, stored=neox_with_own_head
    ),
    "starcoder2: tied by default, with another head stored": Odd(
        "starcoder2", removed=("tie_word_embeddings",), stored=llama_with_own_head
    ),
    "qwen2: rope_scaling beside rope_parameters": Odd(
        "qwen2", added={"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 5000.0}
    ),
    "mistral: rope_scaling with its own theta beside rope_parameters": Odd(
        "mistral",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}},
        added={"rope_scaling": {"rope_type": "yarn", **YARN, "rope_theta": 2000.0}},
    ),
    "qwen3: rope_scaling without a theta, which is the default": Odd(
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        added={"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "llama: an empty rope_scaling beside rope_parameters": Odd(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}},
        added={"rope_scaling": {}},
    ),
    "llama: the older keys of linear scaling": Odd(
        "llama",
        removed=ROPE,
        added={"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 2000.0},
    ),
    "llama: an original length outside of rope_parameters": Odd(
        "llama",
        removed=ROPE,
        added={"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    ),
    "llama: yarn with a factor of attention, not truncated": Odd(
        "llama",
        added={
            "rope_parameters": {
                "rope_type": "yarn",
                **YARN,
                "attention_factor": 1.3,
                "truncate": False,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
            }
        },
    ),
    "olmo2: yarn with mscale": Odd(
        "olmo2",
        added={
            "rope_parameters": {"type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
        },
    ),
    "llama: a part of the heads, which Llama rotates whole": Odd(
        "llama", added={"partial_rotary_factor": 0.5}
    ),
    "glm: 7 of 28 channels by the older key": Odd(
        "glm", removed=ROPE, added={"partial_rotary_factor": 0.25, "rope_theta": 500.0}
    ),
    "phi3: an original length that contradicts rope_scaling": Odd(
        "phi3",
        {"rope_parameters": None},
        removed=ROPE,
        added={
            "original_max_position_embeddings": 16,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 10,
                "long_factor": [1.0 + 0.5 * pair for pair in range(10)],
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "gpt_neox: older keys of rotary positions": Odd(
        "gpt_neox", removed=ROPE, added={"rotary_pct": 0.5, "rotary_emb_base": 500}
    ),
    "gemma3_text: rope_scaling beside values of both kinds of layers": Odd(
        "gemma3_text", added={"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ),
    "gemma3_text: older keys of rotary positions": Odd(
        "gemma3_text",
        removed=ROPE,
        added={
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
        },
    ),
    "olmo3: older keys of rotary positions": Odd(
        "olmo3",
        removed=ROPE,
        added={"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 5000.0},
    ),
    "gpt_oss: rope_scaling in place of YaRN's defaults": Odd(
        "gpt_oss", removed=ROPE, added={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    ),
    "gpt_oss: no scaling": Odd("gpt_oss", added={"rope_parameters": {}}),
    "gpt_oss: an original length outside of rope_parameters": Odd(
        "gpt_oss", added={"original_max_position_embeddings": 32}
    ),
    "granitemoe: no factor of scores": Odd("granitemoe", added={"attention_multiplier": None}),
    "mistral: layer_types": Odd("mistral", added={"layer_types": [FULL, SLIDING, FULL]}),
    "mistral: no window": Odd("mistral", added={"sliding_window": None}),
    "qwen2: windows from the second layer on": Odd(
        "qwen2",
        removed=("layer_types",),
        added={"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2: a window that is switched off": Odd(
        "qwen2",
        removed=("layer_types",),
        added={"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
    ),
    "qwen3: layer_types against max_window_layers": Odd(
        "qwen3",
        added={
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "smollm3: layer_types against use_sliding_window": Odd(
        "smollm3",
        added={
            "use_sliding_window": False,
            "sliding_window": 9,
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
        },
    ),
    "smollm3: layers that rotate nothing": Odd(
        "smollm3", added={"no_rope_layers": [0, 1, 0, 1], "no_rope_layer_interval": 2}
    ),
    "exaone4: no window, every layer rotates": Odd(
        "exaone4",
        added={"sliding_window": None, "sliding_window_pattern": None, "layer_types": [FULL] * 4},
    ),
    "gemma2: soft caps of the family's defaults": Odd(
        "gemma2", removed=("attn_logit_softcapping", "final_logit_softcapping")
    ),
    "gemma2: no soft caps": Odd(
        "gemma2", added={"attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "gemma3_text: a soft cap of scores, which Gemma 3 has not": Odd(
        "gemma3_text", added={"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0}
    ),
    "gemma: the activation by its older name": Odd("gemma", added={"hidden_act": "gelu"}),
    "granite: no factors": Odd(
        "granite",
        removed=(
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ),
    ),
    "gpt2: sizes under the names of other families": Odd(
        "gpt2",
        removed=("n_embd", "n_head", "n_layer"),
        added={"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2},
    ),
    "gpt2: heads that contradict each other": Odd("gpt2", added={"num_attention_heads": 6}),
    "mixtral: experts under another name": Odd(
        "mixtral", removed=("num_local_experts",), added={"num_experts": 5}
    ),
    "llama: as many key heads as query heads by default": Odd(
        "llama", {"num_key_value_heads": 6}, removed=("num_key_value_heads", "head_dim")
    ),
    "llama: biases and GELU": Odd(
        "llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_new"}
    ),
    "opt: no biases, not tied": Odd(
        "opt", {"enable_bias": False, "tie_word_embeddings": False}
    ),
    "llama: dtype by its older name": Odd(
        "llama", removed=("dtype",), added={"torch_dtype": "float16"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_checkpoint_gives_the_greedy_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    directory = ODD[name].write(tmp_path)
    assert choose_model_impl(resolve_model(ModelArgs(model=str(directory)))) is ModelImpl.NATIVE
    prompts = prompts_of(LENGTHS)
    driver = Driver(runner_of(directory, attention_backend="native"))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, COUNT, CHUNK)
    expected = greedy_of(directory, prompts, COUNT)
    assert [request.output for request in requests] == expected
