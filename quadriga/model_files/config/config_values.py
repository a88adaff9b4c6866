"""Read values of a config.json, and refuse those that are not supported."""

from typing import Any

from quadriga.errors import ConfigError, ModelError

# Other names of what a GPT-2, a GPT-J and models with experts have.
GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
EXPERTS_ALIASES = {"num_experts": "num_local_experts"}


class BrokenConfig(ModelError):
    """A config.json contradicts itself, so that nothing can run the model."""


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


def with_defaults(config: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return config.json with `defaults` for keys that are missing or null."""
    return config | {key: setting(config, key, value) for key, value in defaults.items()}


def with_aliases(config: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return config.json with values of other names, which transformers prefers.

    Args:
        config: config.json.
        names: {the other name: the family's own name}.
    """
    return config | {own: config[other] for other, own in names.items() if other in config}


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


def check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise BrokenConfig unless a value of config.json is a multiple of another."""
    if divisor < 1 or value % divisor:
        raise BrokenConfig(
            f"the model's config.json has {name} = {value}, which is no multiple of {divisor_name}"
            f" = {divisor}; take the config.json that the checkpoint was published with"
        )


def head_dim_of(config: dict[str, Any]) -> int:
    """Return `head_dim`, or by default the part of `hidden_size` that each head has.

    Raises:
        ModelError: The heads do not divide `hidden_size`.
    """
    if head_dim := config.get("head_dim"):
        return int(head_dim)
    hidden_size, num_heads = setting(config, "hidden_size"), setting(config, "num_attention_heads")
    check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    return int(hidden_size // num_heads)
