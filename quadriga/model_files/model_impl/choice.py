"""Decide what runs a model, without torch and without importing transformers."""

import enum
from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.architectures import find_architecture, read_architecture
from quadriga.model_files.config.config_values import BrokenConfig
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.model_impl.transformers_package import (
    PackageModel,
    TransformersPackage,
    find_transformers,
)
from quadriga.model_files.resolve import ModelFiles
from quadriga.programs import install_command

_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention"}
_NO_TEXT_MODEL = ("vision_config", "audio_config", "speech_config", "vq_config")


class ModelImpl(enum.Enum):
    """What runs a model: a file of worker_proc/models, or the package transformers."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"


def choose_model_impl(files: ModelFiles) -> ModelImpl:
    """Return what runs a model by `--model-impl`; `auto` prefers a native file.

    Raises:
        ModelError: Nothing that may be chosen runs the model.
    """
    refused_by_native = ""
    if files.model_impl != ModelImpl.TRANSFORMERS.value:
        try:
            read_native(files)
            return ModelImpl.NATIVE
        except BrokenConfig:
            raise
        except ModelError as error:
            if files.model_impl == ModelImpl.NATIVE.value:
                raise
            refused_by_native = str(error)
    if refusal := transformers_refusal(files):
        both = f"{refused_by_native}; by --model-impl transformers: {refusal}"
        raise ModelError(both if refused_by_native else f"{files.location}: {refusal}")
    return ModelImpl.TRANSFORMERS


def read_native(files: ModelFiles) -> DecoderConfig:
    """Return what a model asks of a native file.

    Raises:
        ModelError: No native file runs the model.
    """
    try:
        return read_architecture(files.config)
    except ModelError as error:
        raise type(error)(f"{files.location}: {error}") from None


def native_refusal(files: ModelFiles) -> str | None:
    """Return why no native file runs a model of a known family; None for other models."""
    try:
        find_architecture(files.config)
    except ModelError:
        return None
    try:
        read_architecture(files.config)
    except ModelError as error:
        return str(error)
    return None


def transformers_refusal(files: ModelFiles) -> str | None:
    """Return why the package transformers cannot run a model; None if it may.

    The worker's start makes the last check, by running the model on a few tokens.
    """
    package = find_transformers()
    if package is None:
        return f"the package transformers is not installed; {install_command('transformers')}"
    if files.tensor_index is not None:
        return "a GGUF is only read for native files; take the model's safetensors"
    model_type = str(files.config.get("model_type") or "")
    if files.config.get("is_encoder_decoder"):
        return f"{model_type} is an encoder-decoder, and only decoders are served"
    if _has_remote_code(files.config) and files.trust_remote_code:
        return None
    model = package.find_model(model_type)
    if model is None:
        return _refuse_unknown(files.config, model_type, package)
    return _refuse_known(files.config, model_type, model, package)


def _has_remote_code(config: dict[str, Any]) -> bool:
    return "AutoModelForCausalLM" in (config.get("auto_map") or {})


def _refuse_unknown(config: dict[str, Any], model_type: str, package: TransformersPackage) -> str:
    if _has_remote_code(config):
        return (
            f"{model_type} runs code of its own repository; read that code, then start with"
            " --trust-remote-code"
        )
    return f"transformers {package.version} has no causal language model {model_type!r}"


def _refuse_known(
    config: dict[str, Any], model_type: str, model: PackageModel, package: TransformersPackage
) -> str | None:
    if model.class_name.endswith("ForConditionalGeneration") or any(
        key in config for key in _NO_TEXT_MODEL
    ):
        return f"{model_type} also reads images or audio, and only models of text are served"
    names = [str(name) for name in config.get("architectures") or ()]
    if names and not any(name.endswith(_CAUSAL_SUFFIXES) for name in names):
        return f"config.json names {', '.join(names)}, which is no causal language model"
    layer_types = set(config.get("layer_types") or config.get("layers_block_type") or ["unknown"])
    only_attends = layer_types <= _ATTENTION_LAYERS
    if model.has_own_cache and not only_attends:
        return f"{model_type} has recurrent layers, whose state is not kept in KV pages"
    if not model.has_attention_interface:
        return (
            f"{model.class_name} of transformers {package.version} has no attention interface, by"
            " which it would attend over KV pages"
        )
    return None
