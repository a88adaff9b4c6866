"""Read the config.json of each supported architecture, without torch.

The worker builds models from these configurations, and the launcher refuses a model that has none
before a process starts.
"""

from dataclasses import dataclass, fields
from typing import Any

from quadriga.errors import ConfigError, ModelError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0
INT8_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary positions of a checkpoint; worker_proc/models/rope_scaling.py computes them.

    Attributes:
        head_dim: Channels of a head; all of them are rotated.
        max_length: `max_position_embeddings` in tokens; 0 if config.json has none.
        parameters: `rope_parameters` with `rope_type` and `rope_theta`.
    """

    head_dim: int
    max_length: int
    parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, config: dict[str, Any], head_dim: int) -> "RopeScaling":
        """Read config.json. Raise ModelError if the type of scaling is not supported."""
        parameters: dict[str, Any] = {"rope_theta": config.get("rope_theta") or DEFAULT_THETA}
        parameters |= config.get("rope_scaling") or {}
        parameters |= config.get("rope_parameters") or {}
        parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
        max_length = int(config.get("max_position_embeddings") or 0)
        original = (
            config.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or max_length
        )
        parameters["original_max_position_embeddings"] = original or None
        rotated = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rotated not in (None, 1.0):
            raise ModelError(
                f"the model's config.json has partial_rotary_factor = {rotated}; supported: 1.0"
            )
        if parameters["rope_type"] not in ROPE_KINDS:
            raise ModelError(
                f"the model's config.json has rope_type = {parameters['rope_type']!r}; supported: "
                + ", ".join(ROPE_KINDS)
            )
        return cls(head_dim, max_length, parameters)

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


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The supported part of a Llama's config.json, with the sizes of one rank."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeScaling
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any], tp_size: int = 1) -> "LlamaConfig":
        """Read config.json.

        Raises:
            ModelError: The model needs something that the worker does not implement.
            ConfigError: The model cannot be split over `tp_size` ranks.
        """
        require(config, "hidden_act", ("silu", "swish"))
        hidden_size = setting(config, "hidden_size")
        num_heads = setting(config, "num_attention_heads")
        num_kv_heads = setting(config, "num_key_value_heads", num_heads)
        intermediate_size = setting(config, "intermediate_size")
        check_tp_size(
            tp_size,
            heads=num_heads,
            key_and_value_heads=num_kv_heads,
            intermediate_size=intermediate_size,
        )
        head_dim = setting(config, "head_dim", hidden_size // num_heads)
        return cls(
            vocab_size=setting(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=intermediate_size // tp_size,
            num_layers=setting(config, "num_hidden_layers"),
            num_heads=num_heads // tp_size,
            num_kv_heads=num_kv_heads // tp_size,
            head_dim=head_dim,
            rms_norm_eps=setting(config, "rms_norm_eps", 1e-6),
            rope=RopeScaling.from_hf(config, head_dim),
            attention_bias=setting(config, "attention_bias", False),
            mlp_bias=setting(config, "mlp_bias", False),
            tie_word_embeddings=setting(config, "tie_word_embeddings", False),
        )


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The supported part of a GPT-2's config.json, with the sizes of one rank."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    layer_norm_epsilon: float
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any], tp_size: int = 1) -> "GPT2Config":
        """Read config.json.

        Raises:
            ModelError: The model needs something that the worker does not implement.
            ConfigError: The model cannot be split over `tp_size` ranks.
        """
        require(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"))
        require(config, "scale_attn_weights", (True,))
        require(config, "scale_attn_by_inverse_layer_idx", (False, None))
        require(config, "add_cross_attention", (False, None))
        hidden_size, num_heads = setting(config, "n_embd"), setting(config, "n_head")
        intermediate_size = setting(config, "n_inner", 4 * hidden_size)
        check_tp_size(tp_size, heads=num_heads, intermediate_size=intermediate_size)
        return cls(
            vocab_size=setting(config, "vocab_size"),
            max_position_embeddings=setting(config, "n_positions"),
            hidden_size=hidden_size,
            num_layers=setting(config, "n_layer"),
            num_heads=num_heads // tp_size,
            head_dim=hidden_size // num_heads,
            intermediate_size=intermediate_size // tp_size,
            layer_norm_epsilon=setting(config, "layer_norm_epsilon", 1e-5),
            tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        )

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads of one rank."""
        return self.num_heads


@dataclass(frozen=True, slots=True)
class GemmaConfig(LlamaConfig):
    """The supported part of a Gemma 2's or Gemma 3's config.json, with the sizes of one rank.

    `rope` is that of the layers without a window.

    Attributes:
        attention_scale: Factor of the scores.
        attention_softcap: Bound of the scores; None: none.
        final_softcap: Bound of the logits; None: none.
        windows: Tokens that each layer sees; None: all.
        local_rope: Rotary positions of the layers with a window.
    """

    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]
    local_rope: RopeScaling

    @classmethod
    def from_hf(cls, config: dict[str, Any], tp_size: int = 1) -> "GemmaConfig":
        """Read config.json. Raise the errors of `LlamaConfig.from_hf`."""
        require(config, "hidden_activation", ("gelu_pytorch_tanh",))
        require(config, "use_bidirectional_attention", (False, None))
        require(config, "tie_word_embeddings", (True, None))
        second = find_architecture(config) == "gemma2"
        given = {key: value for key, value in config.items() if value is not None}
        given.pop("hidden_act", None)  # an old name of hidden_activation
        ropes = config.get("rope_parameters") or {}
        given["rope_parameters"] = ropes.get("full_attention", ropes)
        given.setdefault("rope_theta", DEFAULT_THETA if second else 1e6)
        llama = LlamaConfig.from_hf({"head_dim": 256, "tie_word_embeddings": True} | given, tp_size)
        local = {
            "max_position_embeddings": config.get("max_position_embeddings"),
            "rope_theta": config.get("rope_local_base_freq"),
            "rope_parameters": ropes.get("sliding_attention"),
        }
        period = setting(config, "sliding_window_pattern", 2 if second else 6)
        kinds = config.get("layer_types") or [
            "full_attention" if layer % period == 0 else "sliding_attention"
            for layer in range(1, llama.num_layers + 1)
        ]
        if len(kinds) != llama.num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"the model's config.json has layer_types = {kinds}; supported: full_attention or"
                f" sliding_attention for each of the {llama.num_layers} layers"
            )
        window = int(setting(config, "sliding_window", 4096))
        return cls(
            **{field.name: getattr(llama, field.name) for field in fields(LlamaConfig)},
            attention_scale=float(setting(config, "query_pre_attn_scalar", 256)) ** -0.5,
            attention_softcap=config.get("attn_logit_softcapping"),
            final_softcap=config.get("final_logit_softcapping"),
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
            local_rope=llama.rope if second else RopeScaling.from_hf(local, llama.head_dim),
        )


ArchitectureConfig = LlamaConfig | GPT2Config

CONFIGS: dict[str, type[LlamaConfig] | type[GPT2Config]] = {
    "gemma2": GemmaConfig,
    "gemma3": GemmaConfig,
    "gemma3_text": GemmaConfig,
    "gpt2": GPT2Config,
    "llama": LlamaConfig,
    "mistral": LlamaConfig,
    "qwen2": LlamaConfig,
    "qwen3": LlamaConfig,
}

# Their layers attend to a window each; other architectures attend to all tokens.
ARCHITECTURES_WITH_WINDOWS = ("gemma2", "gemma3", "gemma3_text")


def find_architecture(config: dict[str, Any]) -> str:
    """Return the key of CONFIGS for a config.json.

    Raises:
        ModelError: The architecture is not supported.
    """
    names = [config.get("model_type"), *(config.get("architectures") or [])]
    for name in names:
        # A class is called after its model type, such as LlamaForCausalLM or GPT2LMHeadModel.
        kind = str(name).removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
        if kind in CONFIGS:
            return kind
    shown = ", ".join(str(name) for name in names if name) or "nothing"
    raise ModelError(
        f"config.json names {shown} as its architecture; supported: " + ", ".join(sorted(CONFIGS))
    )


def read_architecture(config: dict[str, Any]) -> ArchitectureConfig:
    """Return what a config.json asks of the worker.

    Raises:
        ModelError: The architecture, or something that the model needs, is not supported.
    """
    return CONFIGS[find_architecture(config)].from_hf(config)


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int, int8: bool = False
) -> int:
    """Return the bytes of one token's keys and values in all layers.

    Args:
        num_layers: Number of layers.
        num_kv_heads: Number of key and value heads of a layer.
        head_dim: Number of values of a head.
        item_bytes: Bytes of a value.
        int8: Each head has a scale beside its values.
    """
    scale_bytes = INT8_SCALE_BYTES if int8 else 0
    return 2 * num_layers * num_kv_heads * (head_dim * item_bytes + scale_bytes)


def setting(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return a value of config.json, or `default` if it is missing or null.

    Raises:
        ModelError: It is missing and there is no default.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config.json has no {key!r}")
    return value


def require(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raise ModelError if config.json has a value that is not `allowed`.

    A missing key stands for the first of `allowed`.
    """
    value = config.get(key, allowed[0])
    if value not in allowed:
        shown = ", ".join(repr(choice) for choice in allowed)
        raise ModelError(f"the model's config.json has {key} = {value!r}; supported: {shown}")


def check_tp_size(tp_size: int, **sizes: int) -> None:
    """Raise ConfigError if one of the model's `sizes` is not divisible by `tp_size`."""
    if not any(size % tp_size for size in sizes.values()):
        return
    possible = [n for n in range(1, max(sizes.values()) + 1)
                if not any(size % n for size in sizes.values())]  # fmt: skip
    shown = ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in sizes.items())
    raise ConfigError(
        f"tp is {tp_size}: it must divide the model's {shown}; possible: "
        + ", ".join(map(str, possible))
    )
