"""What the server's info says of the served model's files, for clients that list models."""

import msgspec


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of the served model.

    Attributes:
        family: model_type of config.json.
        container: gguf or safetensors; "" for random weights.
        weight_format: format of most of the weights, or method and bits of a quantized checkpoint.
        num_parameters: number of values of all tensors.
        num_bytes: size of the tensors in the files.
        digest: fingerprint of configuration, tokenizer and weights.
        modified_at: Unix time of the last change of the weights; 0.0 for random ones.
        dimensions: numbers of config.json by Hugging Face's names, such as hidden_size.
    """

    family: str
    container: str = ""
    weight_format: str = ""
    num_parameters: int = 0
    num_bytes: int = 0
    digest: str = ""
    modified_at: float = 0.0
    dimensions: dict[str, int] = {}


def details_to_info(details: ModelDetails) -> dict[str, object]:
    """Return the details as a value of Info."""
    values: dict[str, object] = msgspec.to_builtins(details)
    return values


def details_from_info(values: object) -> ModelDetails:
    """Return the details of a value of Info."""
    return msgspec.convert(values, ModelDetails)
