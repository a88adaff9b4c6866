"""The description of a decoder that worker_proc/models/decoder.py builds, without torch.

First the rotary positions of a config.json, then the decoder.
"""

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from quadriga.errors import ModelError
from quadriga.server.models.families.classifier import HeadConfig
from quadriga.server.models.families.config_values import (
    BrokenConfig,
    check_divides,
    check_tp_size,
    head_dim_of,
    setting,
)

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0


def rope_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's values of rotary positions, which have two names.

    As in transformers, the older name, `rope_scaling`, replaces all of the other one's values.
    """
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def configs_by_layer(
    config: dict[str, Any], thetas: tuple[float, float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json as it is for layers without a window, and for layers with one.

    `rope_scaling` is of the layers without a window; `rope_parameters` has a part for each kind.

    Args:
        config: config.json.
        thetas: `rope_theta` of both kinds, where their values have none.

    Raises:
        ModelError: `rope_parameters` has something beside the two parts, or `rope_scaling` names
            its type by the older key, which transformers does not read here.
    """
    scaling = config.get("rope_scaling") or {}
    if "type" in scaling and "rope_type" not in scaling:
        raise ModelError(
            f"the model's config.json has type = {scaling['type']!r} in rope_scaling; supported for"
            " this model_type: the name rope_type"
        )
    parts = config.get("rope_parameters") or {}
    if unknown := parts.keys() - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"the model's config.json has {', '.join(sorted(unknown))} in rope_parameters;"
            " supported: full_attention and sliding_attention"
        )
    full = (parts.get("full_attention") or {}) | scaling
    sliding = parts.get("sliding_attention") or {}
    shared = config | {"rope_scaling": None, "original_max_position_embeddings": None}
    return (
        shared | {"rope_parameters": {"rope_theta": thetas[0], **full}},
        shared | {"rope_parameters": {"rope_theta": thetas[1], **sliding}},
    )


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary positions of a checkpoint; worker_proc/models/decoder.py computes them.

    Attributes:
        head_dim: channels of a head that are rotated, the first ones.
        max_length: `max_position_embeddings` in tokens; 0 if config.json has none.
        parameters: `rope_parameters` with `rope_type` and `rope_theta`.
    """

    head_dim: int
    max_length: int
    parameters: dict[str, Any]

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], head_dim: int, may_be_partial: bool = False
    ) -> "RopeScaling":
        """Read config.json.

        Args:
            config: config.json.
            head_dim: channels of a head.
            may_be_partial: the family rotates a part of each head if config.json says so. Others
                ignore `partial_rotary_factor`.

        Raises:
            ModelError: the type of scaling is not supported, or not for a part of a head.
        """
        parameters = rope_values(config)
        if nested := [key for key, value in parameters.items() if isinstance(value, dict)]:
            raise ModelError(
                f"the model's config.json has {', '.join(nested)} in rope_parameters; supported for"
                " this model_type: one set of values for all layers"
            )
        theta = parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
        parameters["rope_theta"] = theta
        parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
        max_length = int(config.get("max_position_embeddings") or 0)
        original = (
            config.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or max_length
        )
        parameters["original_max_position_embeddings"] = original or None
        if parameters["rope_type"] not in ROPE_KINDS:
            raise ModelError(
                f"the model's config.json has rope_type = {parameters['rope_type']!r}; supported: "
                + ", ".join(ROPE_KINDS)
            )
        part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        num_rotated = int(head_dim * (1.0 if part is None else part))
        if not may_be_partial:
            if num_rotated != head_dim and parameters["rope_type"] != "default":
                raise ModelError(
                    f"the model's config.json has partial_rotary_factor = {part} together with"
                    f" rope_type = {parameters['rope_type']!r}; supported for this model_type: 1"
                )
            num_rotated = head_dim
        return cls(num_rotated, max_length, parameters)

    @property
    def kind(self) -> str:
        """The `rope_type`, one of ROPE_KINDS."""
        return str(self.parameters["rope_type"])

    @property
    def original_length(self) -> int:
        """The context length of the pretraining, in tokens."""
        return int(setting(self.parameters, "original_max_position_embeddings"))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of `parameters`, or `default` if it is missing or null."""
        return float(setting(self.parameters, name, default))

    def extension(self) -> float:
        """Return `factor`, or by how much the maximal context exceeds the original one."""
        return self.number("factor", self.max_length / self.original_length)


# Activations of an MLP, by the names that config.json has for them.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "clamped_swiglu": "clamped_swiglu",
}
# Names of the tensors of a checkpoint: those of Llama.
NAMES: dict[str, str] = {
    "embedding": "model.embed_tokens",
    "positions": "model.embed_positions",
    "token_types": "model.embed_types",
    "embedding_norm": "model.embed_norm",
    "attention_bias": "model.attention_bias",
    "layers": "model.layers",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "attention_residual_norm": "attention_norm",
    "mlp_residual_norm": "mlp_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "expert": "mlp.experts.{}",
    "expert_gate": "gate_proj",
    "expert_up": "up_proj",
    "expert_down": "down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts that take the place of the MLP.

    Attributes:
        num_experts: experts of a layer.
        num_chosen: experts of a token.
        intermediate_size: of an expert.
        renormalize: the weights of the chosen experts add up to 1.
        bias: router and experts have biases.
        dense_layers: indices of the layers that have an MLP instead.
        transposed: stacked weights are [experts, inputs, outputs].
        interleaved: the rows of gate and up alternate in stacked weights.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    renormalize: bool = True
    bias: bool = False
    dense_layers: frozenset[int] = frozenset()
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: token embeddings, blocks of attention and MLP, a norm and a head.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: number of blocks.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        head_dim: channels of a head.
        norm: "rms", or "layer" with a bias.
        norm_eps: added to the variance.
        norm_offset: added to the weights of norms.
        norm_bias: norms of the kind "layer" have biases.
        first_norm: the first layer's attention has a norm before it, if others have.
        norm_places: norms are before attention and MLP, after them (before their outputs are
            added), at both places, or of the sum after each of them (residual).
        parallel: attention and MLP read the same residual stream.
        qk_norm: each head of queries and keys is normalized, or all heads of a token together.
        qkv_bias: queries, keys and values have biases.
        out_bias: the attention's output projection has a bias.
        mlp_bias: the MLP's projections have biases.
        activation: of the MLP, a value of ACTIVATIONS.
        gated: the MLP multiplies its activation by a second projection.
        experts: what takes the place of the MLP, or None.
        ropes: rotary positions of each layer; None: nothing is rotated.
        interleaved_rope: neighbouring channels are rotated together, instead of channels that are
            half the rotated ones apart.
        num_positions: rows of the learned position embeddings; 0: there are none.
        position_offset: row of position 0.
        num_token_types: rows of the embeddings of token types, of which the first is added to
            every token, or the second to those of a pair's second text; 0: there are none.
        embedding_norm: the embeddings are normalized.
        bidirectional: a token sees the whole text, and none is sampled: an encoder.
        num_bias_buckets: rows of the biases of scores by the distance of two tokens, which all
            layers share; 0: there are none.
        classifier: the head that scores texts; None: there is none.
        windows: tokens that each layer sees, a token itself included; if it is bidirectional, so
            many on either side. None: all.
        attention_scale: factor of the scores.
        attention_softcap: bound of the scores, or None.
        sinks: each head has a score without a value.
        embedding_scale: factor of the embeddings.
        residual_scale: factor of what attention and MLP add to the residual stream.
        logit_scale: factor of the logits.
        logit_softcap: bound of the logits, or None.
        tie_word_embeddings: the embedding is the head.
        head_bias: the head has a bias.
        names: names of tensors that differ from NAMES. "qkv" and "gate_up" are fused projections;
            "experts_gate_up" and "experts_down" are stacked weights of all experts of a layer.
        has_llama_modules: transformers names the modules as those of a Llama, while the checkpoint
            has other names; adapters have those of the modules.
        qkv_by_head: a fused projection has the rows of a query, key and value head side by side.
        transposed: the checkpoint has the weights of blocks as [inputs, outputs].
        skipped: ends of the names of tensors that are not read.
        skipped_starts: starts of such names.
        removed: parts of tensors' names that are removed before they are looked up.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    norm_offset: float = 0.0
    norm_bias: bool = True
    first_norm: bool = True
    norm_places: Literal["before", "after", "around", "residual"] = "before"
    parallel: bool = False
    qk_norm: Literal["heads", "whole"] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    gated: bool = True
    experts: ExpertsConfig | None = None
    ropes: tuple[RopeScaling | None, ...]
    interleaved_rope: bool = False
    num_positions: int = 0
    position_offset: int = 0
    num_token_types: int = 0
    embedding_norm: bool = False
    bidirectional: bool = False
    num_bias_buckets: int = 0
    classifier: HeadConfig | None = None
    windows: tuple[int | None, ...]
    attention_scale: float
    attention_softcap: float | None = None
    sinks: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    tie_word_embeddings: bool = False
    head_bias: bool = False
    names: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    has_llama_modules: bool = False
    qkv_by_head: bool = False
    transposed: bool = False
    skipped: tuple[str, ...] = ()
    skipped_starts: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, config: dict[str, Any], **fields: Any) -> "DecoderConfig":
        """Read what most config.json name alike; `fields` are the others and those that differ.

        Raises:
            ModelError: a value is missing or not supported.
        """
        hidden_size = setting(config, "hidden_size")
        num_layers = setting(config, "num_hidden_layers")
        num_heads = setting(config, "num_attention_heads")
        num_kv_heads = setting(config, "num_key_value_heads", num_heads)
        check_divides("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
        head_dim = fields.get("head_dim") or head_dim_of(config)
        values = {
            "vocab_size": setting(config, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": setting(config, "intermediate_size", 0),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "norm_eps": setting(config, "rms_norm_eps", 1e-6),
            "windows": (None,) * num_layers,
            "attention_scale": head_dim**-0.5,
            "tie_word_embeddings": setting(config, "tie_word_embeddings", False),
        }
        if "ropes" not in fields:
            values["ropes"] = (RopeScaling.from_hf(config, head_dim),) * num_layers
        if "activation" not in fields:
            values["activation"] = activation_of(config, "hidden_act")
        experts = fields.get("experts")
        if experts is not None and not 0 < experts.num_chosen <= experts.num_experts:
            raise BrokenConfig(
                f"the model's config.json chooses {experts.num_chosen} of {experts.num_experts}"
                " experts for a token; take the config.json that the checkpoint was published with"
            )
        values |= fields
        values["names"] = MappingProxyType(fields.get("names") or {})
        return cls(**values)

    def of_rank(self, tp_size: int) -> "DecoderConfig":
        """Return the sizes of one of `tp_size` ranks.

        Raises:
            ConfigError: the model cannot be split over this number of ranks.
        """
        if tp_size == 1:
            return self
        experts = self.experts
        inner = self.intermediate_size if experts is None else experts.intermediate_size
        check_tp_size(
            tp_size,
            heads=self.num_heads,
            key_and_value_heads=self.num_kv_heads,
            intermediate_size=inner,
        )
        if experts is not None:
            experts = replace(experts, intermediate_size=experts.intermediate_size // tp_size)
        return replace(
            self,
            intermediate_size=self.intermediate_size // tp_size,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=self.num_kv_heads // tp_size,
            experts=experts,
        )

    def name(self, key: str) -> str:
        """Return the name of a tensor, without its layer and `.weight`."""
        return self.names.get(key, NAMES[key])


def activation_of(config: dict[str, Any], key: str, default: str = "silu") -> str:
    """Return the activation that config.json names, as a value of ACTIVATIONS.

    Raises:
        ModelError: it is not supported.
    """
    name = str(setting(config, key, default))
    if name not in ACTIVATIONS:
        raise ModelError(
            f"the model's config.json has {key} = {name!r}; supported: " + ", ".join(ACTIVATIONS)
        )
    return ACTIVATIONS[name]
