"""Encoders: BERT, RoBERTa and XLM-RoBERTa, MPNet, DistilBERT, NomicBERT.

One function for each model_type. A token sees the whole text, and norms are of the residual stream
after attention and MLP. The hidden states become vectors, or scores if there is a head.
"""

from typing import Any

from quadriga.server.models.families.classifier import read_head
from quadriga.server.models.families.config_values import (
    head_dim_of,
    require,
    setting,
    with_aliases,
    with_defaults,
)
from quadriga.server.models.families.decoder_config import (
    DEFAULT_THETA,
    DecoderConfig,
    RopeScaling,
    activation_of,
    configs_by_layer,
)
from quadriga.server.models.families.windows import FULL, SLIDING, layer_windows

# By model_type.
ENCODERS = ("bert", "distilbert", "modernbert", "mpnet", "nomic_bert", "roberta", "xlm-roberta")
# Likewise, if their config.json has `use_bidirectional_attention`.
BIDIRECTIONAL = ("gemma3_text",)
# Tensors of heads: of masked language models, poolers and classifiers.
HEADS = (
    "cls.", "lm_head.", "head.", "decoder.", "classifier.", "vocab_", "pooler.", "pre_classifier.",
    "qa_outputs.",
)  # fmt: skip
EMBEDDING_NAMES = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
BERT_NAMES = EMBEDDING_NAMES | {
    "layers": "encoder.layer",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "attention_residual_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_residual_norm": "output.LayerNorm",
}
DISTILBERT_NAMES = EMBEDDING_NAMES | {
    "layers": "transformer.layer",
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "out": "attention.out_lin",
    "attention_residual_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_residual_norm": "output_layer_norm",
}


MPNET_NAMES = BERT_NAMES | {
    "attention_bias": "encoder.relative_attention_bias",
    "q": "attention.attn.q",
    "k": "attention.attn.k",
    "v": "attention.attn.v",
    "out": "attention.attn.o",
    "attention_residual_norm": "attention.LayerNorm",
}
# Neither number is of config.json.
MPNET_BUCKETS = 32
MPNET_PADDING = 2  # rows of the position embeddings
NOMIC_NAMES = EMBEDDING_NAMES | {
    "embedding_norm": "emb_ln",
    "layers": "encoder.layers",
    "qkv": "attn.Wqkv",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "out": "attn.out_proj",
    "attention_residual_norm": "norm1",
    "gate": "mlp.fc12",
    "up": "mlp.fc11",
    "down": "mlp.fc2",
    "mlp_residual_norm": "norm2",
}
# Names of the first published config.json of NomicBERT.
NOMIC_ALIASES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
NOMIC_THETA = 1000.0


def bert(config: dict[str, Any]) -> DecoderConfig:
    """Read a BERT's config.json (Devlin et al. 2018, https://arxiv.org/abs/1810.04805)."""
    return encoder(config, BERT_NAMES, ("bert.", "roberta."))


def roberta(config: dict[str, Any]) -> DecoderConfig:
    """Read a RoBERTa's or XLM-RoBERTa's config.json (https://arxiv.org/abs/1907.11692).

    The first rows of the position embeddings are those of padding.
    """
    offset = num_padding_positions(config)
    return encoder(config, BERT_NAMES, ("roberta.",), position_offset=offset)


def num_padding_positions(config: dict[str, Any]) -> int:
    """Return how many rows of the position embeddings no token of a text has."""
    if config.get("model_type") == "mpnet":
        return MPNET_PADDING
    if config.get("model_type") not in ("roberta", "xlm-roberta"):
        return 0
    return int(setting(config, "pad_token_id", 1)) + 1


def mpnet(config: dict[str, Any]) -> DecoderConfig:
    """Read an MPNet's config.json (Song et al. 2020, https://arxiv.org/abs/2004.09297).

    Scores have biases by the distance of two tokens, which all layers share.
    """
    require(config, "relative_attention_num_buckets", (MPNET_BUCKETS, None))
    return encoder(
        config | {"type_vocab_size": 0},
        MPNET_NAMES,
        ("mpnet.",),
        position_offset=MPNET_PADDING,
        num_bias_buckets=MPNET_BUCKETS,
    )


def distilbert(config: dict[str, Any]) -> DecoderConfig:
    """Read a DistilBERT's config.json (Sanh et al. 2019, https://arxiv.org/abs/1910.01108)."""
    sizes = {
        "hidden_size": setting(config, "dim"),
        "num_hidden_layers": setting(config, "n_layers"),
        "num_attention_heads": setting(config, "n_heads"),
        "intermediate_size": setting(config, "hidden_dim"),
        "hidden_act": setting(config, "activation", "gelu"),
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 0,
    }
    return encoder(config | sizes, DISTILBERT_NAMES, ("distilbert.",))


def nomic_bert(config: dict[str, Any]) -> DecoderConfig:
    """Read a NomicBERT's config.json (Nussbaum et al. 2024, https://arxiv.org/abs/2402.01613).

    Positions are rotary, the MLP is gated, and projections have no biases.
    """
    require(config, "activation_function", ("swiglu", None))
    require(config, "rotary_emb_fraction", (1.0, None))
    require(config, "rotary_scaling_factor", (None,))
    for name in ("prenorm", "use_rms_norm", "rotary_emb_interleaved"):
        require(config, name, (False, None))
    for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        require(config, name, (False, None))
    config = with_aliases(config, NOMIC_ALIASES)
    config = with_defaults(config, rope_theta=NOMIC_THETA, hidden_act="silu")
    rope = RopeScaling.from_hf(config, head_dim_of(config))
    return encoder(
        config,
        NOMIC_NAMES,
        ("nomic_bert.", "bert."),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        gated=True,
        ropes=(rope,) * setting(config, "num_hidden_layers"),
        num_positions=0,
        has_llama_modules=True,
    )


def is_encoder(config: dict[str, Any]) -> bool:
    """Return whether each token of a config.json's model sees the whole text."""
    model_type = config.get("model_type")
    return model_type in ENCODERS or (
        model_type in BIDIRECTIONAL and bool(config.get("use_bidirectional_attention"))
    )


def encoder(
    config: dict[str, Any], names: dict[str, str], removed: tuple[str, ...], **given: Any
) -> DecoderConfig:
    """Read what most encoders' config.json name alike.

    Args:
        config: config.json.
        names: of tensors.
        removed: starts of the names of tensors that a model with a head adds.
        given: fields that differ from BERT's.

    Raises:
        ModelError: a value is missing or not supported.
    """
    head = read_head(config)
    read = () if head is None else (head.dense, head.out)
    skipped = (*HEADS, *(f"{prefix}pooler." for prefix in removed))
    require(config, "position_embedding_type", ("absolute", None))
    require(config, "is_decoder", (False, None))
    require(config, "add_cross_attention", (False, None))
    fields: dict[str, Any] = {
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "gated": False,
        "norm_places": "residual",
        "ropes": (None,) * setting(config, "num_hidden_layers"),
        "num_positions": setting(config, "max_position_embeddings"),
    }
    return DecoderConfig.from_hf(
        config | {"num_key_value_heads": setting(config, "num_attention_heads")},
        norm="layer",
        norm_eps=setting(config, "layer_norm_eps", 1e-12),
        activation=activation_of(config, "hidden_act", "gelu"),
        num_token_types=config.get("type_vocab_size") or 0,
        embedding_norm=True,
        bidirectional=True,
        tie_word_embeddings=True,
        names=names,
        skipped=("embeddings.position_ids",),
        skipped_starts=tuple(start for start in skipped if not _is_read(start, removed, read)),
        classifier=head,
        removed=removed,
        **fields | given,
    )


def _is_read(start: str, removed: tuple[str, ...], read: tuple[str, ...]) -> bool:
    """Return whether the tensors of a head that is read have names with this start."""
    for prefix in removed:
        start = start.removeprefix(prefix)
    return any(f"{name}.".startswith(start) for name in read)


# ModernBERT: rotary positions, and most layers see a window on either side.
#
# Warner et al. 2024, https://arxiv.org/abs/2412.13663.

GLOBAL_THETA = 160_000.0
MODERNBERT_NAMES = {
    "embedding": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "layers": "layers",
    "attention_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "out": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "gate_up": "mlp.Wi",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.Wo",
    "final_norm": "final_norm",
}


def modernbert(config: dict[str, Any]) -> DecoderConfig:
    """Read a ModernBERT's config.json.

    The norm of the embeddings takes the place of that before the first layer's attention.
    """
    require(config, "rope_scaling", (None,))
    num_layers = int(setting(config, "num_hidden_layers", 22))
    period = int(setting(config, "global_attn_every_n_layers", 3))
    types = [SLIDING if number % period else FULL for number in range(num_layers)]
    half = int(setting(config, "local_attention", 128)) // 2
    windows = layer_windows(config | {"sliding_window": half + 1}, types)
    thetas = (
        float(setting(config, "global_rope_theta", GLOBAL_THETA)),
        float(setting(config, "local_rope_theta", DEFAULT_THETA)),
    )
    rope, local = (
        RopeScaling.from_hf(part, head_dim_of(config)) for part in configs_by_layer(config, thetas)
    )
    has_bias = setting(config, "attention_bias", False)
    names = {
        "hidden_act": setting(config, "hidden_activation", "gelu"),
        "layer_norm_eps": setting(config, "norm_eps", 1e-5),
        "type_vocab_size": 0,
    }
    return encoder(
        config | names,
        MODERNBERT_NAMES,
        ("model.",),
        norm_places="before",
        norm_bias=setting(config, "norm_bias", False),
        first_norm=False,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=setting(config, "mlp_bias", False),
        gated=True,
        ropes=tuple(rope if window is None else local for window in windows),
        windows=windows,
        num_positions=0,
    )
