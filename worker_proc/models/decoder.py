"""The decoder of every supported family, and the model of a config.json.

First the rotary frequencies of the scaling types, then the decoder; `build_model` is at the end.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.errors import ConfigError, ModelError
from quadriga.sampling.pooling import MEAN
from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.families.classifier import HeadConfig
from quadriga.server.models.families.config_values import setting
from quadriga.server.models.families.decoder_config import DecoderConfig, RopeScaling
from worker_proc.models.attention import AttentionShape
from worker_proc.models.base import Model, StoredRows, StoredTensor, checkpoint_parts
from worker_proc.models.layers import (
    Activation,
    Attention,
    ClassifierHead,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    Parallel,
    QKNorms,
    RMSNorm,
    Rope,
    parameter,
)
from worker_proc.models.ops import Ops, Value
from worker_proc.models.position_bias import PositionBias
from worker_proc.models.quantized_weights import StackedRows

# Rotary frequencies of the scaling types of Hugging Face's `rope_parameters`.
#
# Source: transformers 5, `modeling_rope_utils.py`. YaRN: Peng et al. 2023,
# https://arxiv.org/abs/2309.00071; LongRoPE: Ding et al. 2024, https://arxiv.org/abs/2402.13753.


def rope_frequencies(scaling: RopeScaling, context_length: int) -> tuple[Tensor, float]:
    """Return the frequencies and the attention factor for a served context.

    Args:
        scaling: rotary positions of the checkpoint.
        context_length: tokens of the longest sequence that the server computes.

    Returns:
        Frequencies [head_dim / 2] in radians per position, float32, and the number by which the
        cosines and sines are multiplied.

    Raises:
        ModelError: a value of `scaling` is missing or wrong, or the frequencies would depend on
            the length of each sequence.
    """
    return _TYPES[scaling.kind](scaling, context_length)


def _powers(scaling: RopeScaling) -> Tensor:
    """Return `rope_theta ** (2 i / head_dim)` as [head_dim / 2] float32."""
    # The device is named because the meta device, the default here, imports for a second.
    pairs = torch.arange(0, scaling.head_dim, 2, dtype=torch.int64, device="cpu").float()
    return float(scaling.parameters["rope_theta"]) ** (pairs / scaling.head_dim)


def _default(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(scaling), 1.0


def _linear(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(scaling) / scaling.number("factor"), 1.0


def _dynamic(scaling: RopeScaling, context_length: int) -> tuple[Tensor, float]:
    """Return the unscaled frequencies, which hold up to `max_position_embeddings`."""
    if context_length > scaling.max_length:
        raise ModelError(
            f"the model's rope_type is 'dynamic', whose frequencies depend on the sequence's length"
            f" above {scaling.max_length} tokens, and the context is {context_length}; start with"
            f" --context-length {scaling.max_length}"
        )
    return 1.0 / _powers(scaling), 1.0


def _llama3(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    """Divide low frequencies by `factor`, keep high ones, interpolate between them."""
    frequencies = 1.0 / _powers(scaling)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    turns = scaling.original_length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.number("factor")), 1.0


def _yarn(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    """Divide low frequencies by `factor`, keep high ones, with a ramp over the pairs between."""
    factor = scaling.extension()
    low = _pair_with_turns(scaling, scaling.number("beta_fast", 32))
    high = _pair_with_turns(scaling, scaling.number("beta_slow", 1))
    if scaling.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, scaling.head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(scaling.head_dim // 2, device="cpu").float()
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    powers = _powers(scaling)
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return frequencies, _yarn_attention_factor(scaling, factor)


def _pair_with_turns(scaling: RopeScaling, num_turns: float) -> float:
    """Return the index of the pair that turns so often over the original context."""
    wavelength = scaling.original_length / (num_turns * 2 * math.pi)
    return scaling.head_dim * math.log(wavelength) / (2 * math.log(scaling.number("rope_theta")))


def _yarn_attention_factor(scaling: RopeScaling, factor: float) -> float:
    given = scaling.parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    numerator = scaling.parameters.get("mscale")
    denominator = scaling.parameters.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(float(numerator)) / magnitude(float(denominator))
    return magnitude(1.0)


def _longrope(scaling: RopeScaling, context_length: int) -> tuple[Tensor, float]:
    """Divide by `long_factor` if the served context exceeds the original one.

    Keys in the cache keep the frequencies that they were written with, so one list serves all
    sequences.
    """
    original = scaling.original_length
    name = "long_factor" if context_length > original else "short_factor"
    divisors = torch.tensor(setting(scaling.parameters, name), dtype=torch.float32, device="cpu")
    if divisors.shape != _powers(scaling).shape:
        raise ModelError(
            f"the model's config.json has {len(divisors)} values in {name}; head_dim"
            f" {scaling.head_dim} needs {scaling.head_dim // 2}"
        )
    given, factor = scaling.parameters.get("attention_factor"), scaling.extension()
    if given is None:
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (divisors * _powers(scaling)), float(given)


_TYPES: dict[str, Callable[[RopeScaling, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


class Decoder(Model):
    """Token embeddings, blocks of attention and MLP, a norm and a head."""

    def __init__(self, whole: DecoderConfig, tp_size: int = 1) -> None:
        super().__init__()
        if tp_size > 1 and (whole.sinks or whole.qk_norm == "whole" or whole.num_bias_buckets):
            raise ConfigError(
                f"tp is {tp_size}, but attention sinks, biases of scores and norms over all heads"
                " are not split: leave --tp out"
            )
        self.config = config = whole.of_rank(tp_size)
        self.vocab_size = config.vocab_size
        self.attention_shape = AttentionShape(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.bidirectional,
        )
        hidden_size = config.hidden_size
        self.embedding = Embedding(config.vocab_size, hidden_size)
        # As in training, the factor is rounded to the dtype of the weights.
        scale = torch.tensor(config.embedding_scale, device="cpu")
        self.embedding_scale = float(scale.to(self.embedding.weight.dtype))
        self.position_embedding = (
            Embedding(config.num_positions, hidden_size, config.position_offset)
            if config.num_positions
            else None
        )
        self.blocks = nn.ModuleList(
            DecoderBlock(config, layer) for layer in range(config.num_layers)
        )
        self.has_head = not config.bidirectional
        self.token_types = (
            Embedding(config.num_token_types, hidden_size) if config.num_token_types else None
        )
        # What a token of the second type has more than one of the first; None: there is one type.
        self.second_type: Tensor | None = None
        self.embedding_norm = _norm(config) if config.embedding_norm else None
        self.attention_bias = (
            parameter(config.num_bias_buckets, config.num_heads)
            if config.num_bias_buckets
            else None
        )
        self.final_norm = None if config.norm_places == "residual" else _norm(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings or not self.has_head
            else Linear(hidden_size, config.vocab_size, config.head_bias)
        )
        self.classifier = None if config.classifier is None else _head(config, config.classifier)

    def forward(self, ops: Ops[Value]) -> Value:
        x = ops.embed(
            self.embedding, self.position_embedding, self.embedding_scale, self.second_type
        )
        if self.embedding_norm is not None:
            x = ops.norm_residual(self.embedding_norm, x)
        for layer, block in enumerate(self._blocks()):
            x = block.forward(ops, layer, x)
        return x

    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        assert self.final_norm is not None
        x, config = ops.norm(self.final_norm, hidden), self.config
        head = self.lm_head or self.embedding
        return ops.logits(head, x, config.logit_scale, config.logit_softcap)

    def finish_loading(self, context_length: int) -> None:
        device = self.embedding.weight.device
        if self.token_types is not None:
            types = self.token_types.weight
            if len(types) > 1:
                self.second_type = types[1].float() - types[0].float()
            (self.position_embedding or self.embedding).weight += types[0]
        for norm in self.modules():
            if isinstance(norm, LayerNorm) and not norm.has_bias:
                norm.bias.zero_()
        bias = self.attention_bias
        position_bias = None if bias is None else PositionBias(bias, context_length)
        ropes: dict[int, Rope] = {}
        for block, scaling in zip(self._blocks(), self.config.ropes, strict=True):
            if (block.attention.window or 0) >= context_length:
                block.attention.window = None
            block.attention.position_bias = position_bias
            if scaling is None:
                continue
            if id(scaling) not in ropes:
                ropes[id(scaling)] = _rope(scaling, context_length, device)
            block.attention.rope = ropes[id(scaling)]

    def checkpoint_parts(
        self, name: str, tensor: StoredTensor | StackedRows
    ) -> Iterator[tuple[str, StoredTensor]]:
        return checkpoint_parts(self.config, name, tensor)

    def checkpoint_rows(self) -> dict[str, StoredRows]:
        name = self.config.name
        rows = _all_rows(name("embedding"), self.embedding)
        if self.position_embedding is not None:
            rows |= _all_rows(name("positions"), self.position_embedding)
        if self.token_types is not None:
            rows |= _all_rows(name("token_types"), self.token_types)
        if self.lm_head is not None:
            rows |= _all_rows(name("head"), self.lm_head)
        for layer, block in enumerate(self._blocks()):
            for part, of_part in block.checkpoint_rows().items():
                rows[f"{name('layers')}.{layer}.{part}"] = of_part
        return rows

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        name = self.config.name
        tensors: dict[str, Tensor] = {}
        for stored, rows in self.checkpoint_rows().items():
            tensors |= rows.tensors(stored)
        if self.embedding_norm is not None:
            tensors |= _of_norm(name("embedding_norm"), self.embedding_norm)
        if self.attention_bias is not None:
            tensors[f"{name('attention_bias')}.weight"] = self.attention_bias
        if self.final_norm is not None:
            tensors |= _of_norm(name("final_norm"), self.final_norm)
        if self.classifier is not None:
            assert self.config.classifier is not None
            tensors |= _of_head(self.config.classifier, self.classifier)
        for layer, block in enumerate(self._blocks()):
            for part, tensor in block.other_tensors().items():
                tensors[f"{name('layers')}.{layer}.{part}"] = tensor
        return tensors

    def _blocks(self) -> Iterator["DecoderBlock"]:
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            yield block


class DecoderBlock(nn.Module):
    """Attention, then an MLP or experts, each with its norms, added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        before = config.norm_places in ("before", "around")
        after, residual = (
            config.norm_places in ("after", "around"),
            config.norm_places == "residual",
        )
        hidden_size, dim = config.hidden_size, config.head_dim
        self.q_size, self.kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.attention_norm = _norm(config) if before and (layer or config.first_norm) else None
        self.qkv_proj = Linear(
            hidden_size, self.q_size + 2 * self.kv_size, config.qkv_bias, Parallel.COLUMN
        )
        self.attention = Attention(
            config.attention_scale,
            self._qk_norms(),
            config.attention_softcap,
            config.windows[layer],
            parameter(config.num_heads) if config.sinks else None,
        )
        self.out_proj = Linear(self.q_size, hidden_size, config.out_bias, Parallel.ROW)
        self.attention_post_norm = _rms_norm(config) if after else None
        self.attention_residual_norm = _norm(config) if residual else None
        shares_norm = config.parallel and config.name("mlp_norm") == config.name("attention_norm")
        self.mlp_norm = _norm(config) if before and not shares_norm else None
        self.mlp: MLP | None = None
        self.experts: Experts | None = None
        if config.experts is None or layer in config.experts.dense_layers:
            self.mlp = MLP(config)
        else:
            self.experts = _experts(config)
        self.mlp_post_norm = _rms_norm(config) if after else None
        self.mlp_residual_norm = _norm(config) if residual else None

    def forward(self, ops: Ops[Value], layer: int, x: Value) -> Value:
        if self.config.parallel:
            return self._parallel(ops, layer, x)
        attended = self._attend(ops, layer, x if self.attention_norm is None
                                else ops.norm(self.attention_norm, x))  # fmt: skip
        x = self._add(ops, x, self.out_proj, self.attention_post_norm, attended)
        if self.attention_residual_norm is not None:
            x = ops.norm_residual(self.attention_residual_norm, x)
        x_mlp = x if self.mlp_norm is None else ops.norm(self.mlp_norm, x)
        if self.experts is not None:
            return ops.experts_add(x, self.experts, x_mlp, self.config.residual_scale)
        assert self.mlp is not None
        inner = self.mlp.inner(ops, x_mlp)
        x = self._add(ops, x, self.mlp.down_proj, self.mlp_post_norm, inner)
        if self.mlp_residual_norm is not None:
            x = ops.norm_residual(self.mlp_residual_norm, x)
        return x

    def checkpoint_rows(self) -> dict[str, StoredRows]:
        """Return the rows of the block's matrices by their names, without the layer's."""
        name, heads = self.config.name, {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}
        rows = _all_rows(name("out"), self.out_proj)
        rows |= _split_rows(self.qkv_proj, {name(key): size for key, size in heads.items()})
        if self.mlp is not None:
            return rows | self.mlp.checkpoint_rows()
        assert self.experts is not None
        return rows | _rows_of_experts(self.config, self.experts)

    def other_tensors(self) -> dict[str, Tensor]:
        """Return the block's norms and sinks by their names, without the layer's."""
        name, tensors = self.config.name, dict[str, Tensor]()
        for key in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            if (norm := getattr(self, key)) is not None:
                tensors |= _of_norm(name(key), norm)
        for key in ("attention_residual_norm", "mlp_residual_norm"):
            if (norm := getattr(self, key)) is not None:
                tensors |= _of_norm(name(key), norm)
        if (norms := self.attention.norms) is not None:
            tensors |= _of_norm(name("q_norm"), norms.queries)
            tensors |= _of_norm(name("k_norm"), norms.keys)
        if self.attention.sinks is not None:
            tensors[name("sinks")] = self.attention.sinks
        return tensors

    def _parallel(self, ops: Ops[Value], layer: int, x: Value) -> Value:
        """Add attention and MLP, which read the same residual stream."""
        assert self.attention_norm is not None
        assert self.mlp is not None
        attended = self._attend(ops, layer, ops.norm(self.attention_norm, x))
        inner = self.mlp.inner(ops, ops.norm(self.mlp_norm or self.attention_norm, x))
        x = self._add(ops, x, self.out_proj, None, attended)
        return self._add(ops, x, self.mlp.down_proj, None, inner)

    def _attend(self, ops: Ops[Value], layer: int, x: Value) -> Value:
        return ops.attend(layer, ops.linear(self.qkv_proj, x), self.attention)

    def _add(
        self, ops: Ops[Value], x: Value, proj: Linear, norm: RMSNorm | None, value: Value
    ) -> Value:
        """Add a projection of `value`, normalized if there is a norm, to the residual stream."""
        if norm is None:
            return ops.linear_add(x, proj, value, self.config.residual_scale)
        return ops.norm_add(x, norm, ops.linear(proj, value))

    def _qk_norms(self) -> QKNorms | None:
        config = self.config
        if config.qk_norm is None:
            return None
        whole = config.qk_norm == "whole"
        sizes = (self.q_size, self.kv_size) if whole else (config.head_dim, config.head_dim)
        return QKNorms(*sizes, config.norm_eps, config.norm_offset, whole)


class MLP(nn.Module):
    """Two or, if it is gated, three projections with an activation."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.activation = Activation(config.activation)
        inner, hidden_size, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        width = 2 * inner if config.gated else inner
        self.up_proj = Linear(hidden_size, width, bias, Parallel.COLUMN)
        self.down_proj = Linear(inner, hidden_size, bias, Parallel.ROW)

    def inner(self, ops: Ops[Value], x: Value) -> Value:
        """Return what the down projection reads, [tokens, intermediate_size]."""
        if self.config.gated:
            return ops.linear_gated(self.up_proj, x, self.activation)
        return ops.linear_activation(self.up_proj, x, self.activation)

    def checkpoint_rows(self) -> dict[str, StoredRows]:
        """Return the rows of the matrices by their names in the checkpoint, without the layer's."""
        name, keys = self.config.name, ("gate", "up") if self.config.gated else ("up",)
        parts = {name(key): self.config.intermediate_size for key in keys}
        return _split_rows(self.up_proj, parts) | _all_rows(name("down"), self.down_proj)


def _norm(config: DecoderConfig) -> LayerNorm | RMSNorm:
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)
    return _rms_norm(config)


def _rms_norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)


def _head(config: DecoderConfig, head: HeadConfig) -> ClassifierHead:
    return ClassifierHead(
        config.hidden_size,
        head.num_labels,
        head.activation,
        head.dense_bias,
        LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias) if head.norm else None,
        head.pooling == MEAN,
    )


def _of_head(names: HeadConfig, head: ClassifierHead) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {
        f"{names.dense}.weight": head.dense_weight,
        f"{names.out}.weight": head.out_weight,
        f"{names.out}.bias": head.out_bias,
    }
    if head.dense_bias is not None:
        tensors[f"{names.dense}.bias"] = head.dense_bias
    return tensors if head.norm is None else tensors | _of_norm(names.norm, head.norm)


def _rope(scaling: RopeScaling, context_length: int, device: torch.device) -> Rope:
    frequencies, attention_factor = rope_frequencies(scaling, context_length)
    return Rope(frequencies, context_length, device, attention_factor)


def _experts(config: DecoderConfig) -> Experts:
    experts = config.experts
    assert experts is not None
    return Experts(
        config.hidden_size,
        experts.intermediate_size,
        experts.num_experts,
        experts.num_chosen,
        experts.renormalize,
        Activation(config.activation),
        experts.bias,
    )


def _rows_of_experts(config: DecoderConfig, experts: Experts) -> dict[str, StoredRows]:
    name = config.name
    rows = _all_rows(name("router"), experts.router)
    for number, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        assert isinstance(gate_up, Linear)
        assert isinstance(down, Linear)
        expert, size = name("expert").format(number), down.weight.shape[1]
        parts = {f"{expert}.{name(key)}": size for key in ("expert_gate", "expert_up")}
        rows |= _split_rows(gate_up, parts)
        rows |= _all_rows(f"{expert}.{name('expert_down')}", down)
    return rows


def _of_norm(name: str, norm: LayerNorm | RMSNorm) -> dict[str, Tensor]:
    tensors = {f"{name}.weight": norm.weight}
    if isinstance(norm, LayerNorm) and norm.has_bias:
        tensors[f"{name}.bias"] = norm.bias
    return tensors


def _all_rows(name: str, matrix: Linear | Embedding) -> dict[str, StoredRows]:
    return {name: StoredRows(matrix, 0, len(matrix.weight))}


def _split_rows(matrix: Linear, sizes: dict[str, int]) -> dict[str, StoredRows]:
    """Return the rows of a fused projection, in the order of the names."""
    starts = itertools.accumulate(sizes.values(), initial=0)
    named = zip(sizes.items(), starts, strict=False)
    return {name: StoredRows(matrix, first, size) for (name, size), first in named}


def build_model(
    config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("meta"),  # noqa: B008 (never changed)
    tp_size: int = 1,
) -> Model:
    """Build the model of a config.json, or one rank's part of it, with uninitialised weights.

    On the meta device, the weights have no storage.

    Raises:
        ModelError: the architecture is not supported.
        ConfigError: the model cannot be split over `tp_size` ranks.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Decoder(read_architecture(config), tp_size)
    finally:
        torch.set_default_dtype(previous)
