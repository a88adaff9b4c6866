"""The settings of a PEFT adapter: its adapter_config.json.

Source: PEFT 0.21, `LoraConfig` and `get_pattern_key`.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from quadriga.errors import ModelError, quoted

CONFIG_NAME = "adapter_config.json"
BIASES = ("none", "all", "lora_only")
MAX_RANK, MAX_ALPHA = 1_000_000, 1e9
PATTERN_TIMEOUT_S = 1.0  # of one comparison of a name with an expression
# Fields that change what is computed, in a way that is not; each with its remedy.
_UNSUPPORTED = {
    "alora_invocation_tokens": "train it without alora_invocation_tokens",
    "arrow_config": "train it without arrow_config",
    "kasa_config": "train it without kasa_config",
    "layer_replication": "train it without layer_replication",
    "monteclora_config": "train it without monteclora_config",
    "use_bdlora": "train it without use_bdlora",
    "use_qalora": "train it without use_qalora",
}
# Values of init_lora_weights that change the base's weights, beside which the adapter is trained.
_CHANGED_BASES = ("corda", "loftq", "lora_ga", "olora", "pissa")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What adapter_config.json says.

    Attributes:
        base: `base_model_name_or_path`, or "".
        rank, alpha: of matrices that no pattern names.
        rank_pattern, alpha_pattern: others, by expressions of the ends of modules' names.
        is_rank_stabilized: the scaling is alpha / sqrt(rank) instead of alpha / rank.
        target_modules: ends of the modules' names, or an expression of them, or ALL_LINEAR.
        excluded: likewise, of modules that do not change after all.
        layers: the numbers of the layers that change; None: all.
        modules_to_save: ends of the names of modules that are saved whole.
        trained_tokens: ids of tokens whose vectors are saved, by the end of the name of their
            table; "": the embedding.
        target_parameters: likewise of stacked weights, such as those of experts.
        bias: one of BIASES: which biases of the base are saved.
        uses_dora: rows have magnitudes of their own.
    """

    base: str
    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    is_rank_stabilized: bool
    target_modules: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    modules_to_save: tuple[str, ...]
    trained_tokens: dict[str, tuple[int, ...]]
    target_parameters: tuple[str, ...]
    bias: str
    uses_dora: bool

    @property
    def largest_rank(self) -> int:
        """The largest rank of a matrix."""
        return max(self.rank, *self.rank_pattern.values(), 0)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module. Raises ModelError for a broken expression."""
        return self.rank_pattern.get(_pattern_of(self.rank_pattern, module), self.rank)

    def trained_tokens_of(self, module: str) -> tuple[int, ...]:
        """Return the ids of the tokens that a module has vectors of."""
        for name, token_ids in self.trained_tokens.items():
            if not name or module == name or module.endswith(f".{name}"):
                return token_ids
        return ()

    def is_excluded(self, module: str) -> bool:
        """Return whether a module stays as it is. Raises ModelError for a broken expression."""
        if isinstance(self.excluded, str):
            return bool(self.excluded) and _fits(rf"(?:{self.excluded})$", module)
        return any(module == name or module.endswith(f".{name}") for name in self.excluded)

    def scaling_of(self, module: str) -> float:
        """Return the factor of a module's product. Raises ModelError for a broken expression."""
        alpha = self.alpha_pattern.get(_pattern_of(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _pattern_of(patterns: dict[str, Any], module: str) -> str:
    """Return the first expression that fits the end of a module's name; "" if none does."""
    for pattern in patterns:
        if pattern and _fits(rf"(.*\.)?({pattern})$", module):
            return pattern
    return ""


def _fits(pattern: str, name: str) -> bool:
    """Return whether an expression fits a name. It has a time limit, as a file has made it."""
    import regex

    try:
        return regex.match(pattern, name, timeout=PATTERN_TIMEOUT_S) is not None
    except (regex.error, TimeoutError, RecursionError, OverflowError) as error:
        raise ModelError(
            f"the expression {quoted(pattern)} of {CONFIG_NAME} cannot be used: {error}; name the"
            " modules instead"
        ) from None


def parse_config(text: bytes) -> PeftConfig:
    """Read the text of adapter_config.json.

    Raises:
        ModelError: it is broken, or of an adapter that is not supported; the message has to be
            put behind the adapter's path.
    """
    try:
        config = json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"its {CONFIG_NAME} is no JSON: {error}; save the adapter again") from None
    if not isinstance(config, dict):
        raise ModelError(f"its {CONFIG_NAME} is no JSON object; save the adapter again")
    _check_supported(config)
    return PeftConfig(
        base=_text(config, "base_model_name_or_path"),
        rank=_rank(config.get("r"), "r"),
        alpha=_number(config.get("lora_alpha"), "lora_alpha"),
        rank_pattern={
            name: _rank(value, f"rank_pattern[{name!r}]")
            for name, value in _object(config, "rank_pattern").items()
        },
        alpha_pattern={
            name: _number(value, f"alpha_pattern[{name!r}]")
            for name, value in _object(config, "alpha_pattern").items()
        },
        is_rank_stabilized=bool(config.get("use_rslora")),
        target_modules=_targets(config, "target_modules"),
        excluded=_targets(config, "exclude_modules"),
        layers=_layers(config.get("layers_to_transform")),
        modules_to_save=_texts(config, "modules_to_save"),
        trained_tokens=_trained_tokens(config.get("trainable_token_indices")),
        target_parameters=_texts(config, "target_parameters"),
        bias=_choice(config, "bias", BIASES),
        uses_dora=bool(config.get("use_dora")),
    )


def _check_supported(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"its {CONFIG_NAME} has peft_type {quoted(config.get('peft_type'))}; supported: 'LORA'"
        )
    for field, remedy in _UNSUPPORTED.items():
        if config.get(field):
            raise ModelError(f"its {CONFIG_NAME} has {field}, which is not supported: {remedy}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASES):
        raise ModelError(
            f"its {CONFIG_NAME} has init_lora_weights {quoted(init)}, which changes the base's"
            " weights: save it with path_initial_model_for_weight_conversion, which makes a plain"
            " LoRA of it"
        )


def _wrong(field: str, value: object, wanted: str) -> ModelError:
    return ModelError(f"its {CONFIG_NAME} has {field} = {quoted(value)}; it must be {wanted}")


def _rank(value: object, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise _wrong(field, value, f"a whole number from 1 to {MAX_RANK}")
    return value


def _number(value: object, field: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_ALPHA:
        return float(value)
    raise _wrong(field, value, f"a number up to {MAX_ALPHA:g}")


def _text(config: dict[str, Any], field: str) -> str:
    value = config.get(field)
    if value is not None and not isinstance(value, str):
        raise _wrong(field, value, "a text")
    return value or ""


def _object(config: dict[str, Any], field: str) -> dict[str, Any]:
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise _wrong(field, value, "an object")
    return value


def _texts(config: dict[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field) or []
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise _wrong(field, value, "a list of names")
    return tuple(sorted(value))


def _targets(config: dict[str, Any], field: str) -> tuple[str, ...] | str:
    value = config.get(field)
    return value if isinstance(value, str) else _texts(config, field)


def _layers(value: object) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise _wrong("layers_to_transform", value, "a number of a layer, or a list of them")
    return tuple(sorted(set(numbers)))


def _trained_tokens(value: object) -> dict[str, tuple[int, ...]]:
    by_name: dict[str, Any] = value if isinstance(value, dict) else {"": value or []}
    for token_ids in by_name.values():
        is_list = isinstance(token_ids, list)
        if not is_list or not all(isinstance(i, int) and i >= 0 for i in token_ids):
            wanted = "a list of token ids, or one for each table's name"
            raise _wrong("trainable_token_indices", value, wanted)
    return {str(name): tuple(ids) for name, ids in by_name.items() if ids}


def _choice(config: dict[str, Any], field: str, choices: tuple[str, ...]) -> str:
    value = config.get(field) or choices[0]
    if value not in choices:
        raise _wrong(field, value, f"one of {', '.join(choices)}")
    return str(value)


# The names of the tensors: the path of a module, and what of it changes.
#
# Source: PEFT 0.21, `get_peft_model_state_dict`.

PREFIX = "base_model.model."
DOWN, UP, UP_BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
MAGNITUDE = "lora_magnitude_vector"
EMBEDDING_DOWN, EMBEDDING_UP = "lora_embedding_A", "lora_embedding_B"
TOKENS = "token_adapter.trainable_tokens_delta"
BASE_WEIGHT, BASE_BIAS = "base_layer.weight", "base_layer.bias"
WEIGHT, BIAS = "weight", "bias"
# The longest ones first: a name has the first end that fits.
KINDS = (DOWN, UP, UP_BIAS, MAGNITUDE, EMBEDDING_DOWN, EMBEDDING_UP, TOKENS, BASE_WEIGHT,
         BASE_BIAS, WEIGHT, BIAS)  # fmt: skip
# Parts of names of other methods, which end as those of LoRA do.
_OTHERS = (".lora_", ".lokr_", ".loha_", ".ia3_", ".oft_", ".prompt_")


def split_name(name: str) -> tuple[str, str] | None:
    """Return the path of a tensor's module and its kind, one of KINDS; None if it has none."""
    path = name.removeprefix(PREFIX).replace(".default.", ".")
    if path.endswith(f".{MAGNITUDE}.weight"):
        path = path.removesuffix(".weight")
    kind = next((kind for kind in KINDS if path.endswith(f".{kind}")), None)
    if kind is None:
        return None
    module = path.removesuffix(f".{kind}")
    return None if any(other in f"{module}." for other in _OTHERS) else (module, kind)
