"""Describe the served model's files for the server's info, from their headers."""

from typing import Any

from quadriga.cli.models.weights import WeightSummary, summarize_weights, weight_files
from quadriga.errors import ModelError
from quadriga.model_details import ModelDetails
from quadriga.model_files.quantized.methods import read_quantization
from quadriga.model_files.resolve import ModelFiles

# Hugging Face's name of a dimension -> GPT-2's, which some families have instead.
DIMENSIONS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head",
    "vocab_size": "vocab_size",
}


def model_details(files: ModelFiles) -> ModelDetails:
    """Return the details; those of the weights are empty if a file of them is damaged."""
    try:
        weights = summarize_weights(files, checks_files=False)
    except ModelError:  # the worker, which reads all of the file, reports it
        weights = WeightSummary()
    return ModelDetails(
        family=str(files.config.get("model_type") or ""),
        container=_container(files),
        weight_format=_weight_format(files, weights),
        num_parameters=weights.num_parameters,
        num_bytes=sum(weights.bytes_by_format.values()),
        digest=files.fingerprint,
        modified_at=_modified_at(files),
        dimensions=_dimensions(files.config),
    )


def _container(files: ModelFiles) -> str:
    if files.weights is None:
        return ""
    return "safetensors" if files.tensor_index is None else "gguf"


def _weight_format(files: ModelFiles, weights: WeightSummary) -> str:
    quantization = read_quantization(files.config)
    if quantization is not None:
        return str(quantization)
    return next((name for name, _ in weights.bytes_by_format.most_common(1)), "")


def _modified_at(files: ModelFiles) -> float:
    if files.weights is None:
        return 0.0
    return max((path.stat().st_mtime for path in weight_files(files.weights)), default=0.0)


def _dimensions(config: dict[str, Any]) -> dict[str, int]:
    values = {name: config.get(name, config.get(other)) for name, other in DIMENSIONS.items()}
    return {name: value for name, value in values.items() if isinstance(value, int)}
