"""Decide whether a model can be served, and what runs it: a native file or transformers.

All without torch, without importing transformers and without the weights. In order: what the
installed transformers can run, the choice, the flags that need a native file, the checks, and
`find_served_model`, which the launcher calls before any process starts.
"""

import ast
import enum
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError, ModelError
from quadriga.programs import install_command
from quadriga.server.config import engine_args, server_config
from quadriga.server.models.families import architectures, bert, config_values, decoder_config
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.quantization import check_packed_types, read_quantization
from quadriga.server.models.resolve import ModelFiles, resolve_model

# Importing transformers takes seconds and loads torch. The list of its causal language models is
# a literal in `models/auto/modeling_auto.py`, and each model's source shows its features.

_LIST_OF_MODELS = "models/auto/modeling_auto.py"
_NAME_OF_LIST = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@dataclass(frozen=True, slots=True)
class PackageModel:
    """A causal language model of the package.

    Attributes:
        class_name: such as LlamaForCausalLM.
        has_attention_interface: its attention function can be chosen.
        has_own_cache: it keeps a state that grows by other rules than keys and values.
    """

    class_name: str
    has_attention_interface: bool
    has_own_cache: bool


@dataclass(frozen=True, slots=True)
class TransformersPackage:
    """The installed package.

    Attributes:
        version: such as 5.0.0.
        root: its directory.
    """

    version: str
    root: Path

    def find_model(self, model_type: str) -> PackageModel | None:
        """Return the causal language model of a `model_type`, or None if there is none."""
        class_name = _class_names(self.root).get(model_type)
        source = _sources_of_classes(self.root).get(class_name or "")
        if class_name is None or source is None:
            return None
        text = source.read_text(encoding="utf-8")
        return PackageModel(
            class_name,
            has_attention_interface="ALL_ATTENTION_FUNCTIONS" in text,
            has_own_cache=bool(re.search(r"^ +_is_stateful = True", text, re.M)),
        )


def find_transformers() -> TransformersPackage | None:
    """Return the installed package; None without one."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    return TransformersPackage(version("transformers"), Path(spec.origin).parent)


@cache
def _class_names(root: Path) -> dict[str, str]:
    """Return the class of each `model_type` of a causal language model."""
    tree = ast.parse((root / _LIST_OF_MODELS).read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if names == [_NAME_OF_LIST]:
            return dict(ast.literal_eval(node.value.args[0]))
    return {}


@cache
def _sources_of_classes(root: Path) -> dict[str, Path]:
    """Return the file that defines each causal language model."""
    wanted = set(_class_names(root).values())
    found: dict[str, Path] = {}
    for source in (root / "models").glob("*/modeling_*.py"):
        for name in re.findall(r"^class (\w+)\(", source.read_text(encoding="utf-8"), re.M):
            if name in wanted:
                found[name] = source
    return found


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
        ModelError: nothing that may be chosen runs the model.
    """
    refused_by_native = ""
    if files.model_impl != ModelImpl.TRANSFORMERS.value:
        try:
            read_native(files)
            return ModelImpl.NATIVE
        except config_values.BrokenConfig:
            raise
        except ModelError as error:
            if files.model_impl == ModelImpl.NATIVE.value:
                raise
            refused_by_native = str(error)
    if refusal := transformers_refusal(files):
        both = f"{refused_by_native}; by --model-impl transformers: {refusal}"
        raise ModelError(both if refused_by_native else f"{files.location}: {refusal}")
    return ModelImpl.TRANSFORMERS


def read_native(files: ModelFiles) -> decoder_config.DecoderConfig:
    """Return what a model asks of a native file.

    Raises:
        ModelError: no native file runs the model.
    """
    try:
        return architectures.read_architecture(files.config)
    except ModelError as error:
        raise type(error)(f"{files.location}: {error}") from None


def native_refusal(files: ModelFiles) -> str | None:
    """Return why no native file runs a model of a known family; None for other models."""
    try:
        architectures.find_architecture(files.config)
    except ModelError:
        return None
    try:
        architectures.read_architecture(files.config)
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
    if bert.is_encoder(files.config):
        return f"{model_type} is an encoder, and transformers runs causal language models only"
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


def check_flags(args: engine_args.WorkerArgs, impl: ModelImpl) -> None:
    """Raise ConfigError for the first flag that is not supported by what runs the model."""
    if impl is ModelImpl.NATIVE:
        return
    for flag, is_set in (
        (
            f"--attention-backend {args.attention_backend}",
            args.attention_backend not in ("auto", "torch"),
        ),
        (f"--quantization {args.quantization}", args.quantization not in ("auto", "none")),
        (f"--kv-cache-dtype {args.kv_cache_dtype}", args.kv_cache_dtype != "auto"),
        ("--enable-deterministic-inference", args.enable_deterministic_inference),
    ):
        if is_set:
            raise ConfigError(
                f"{flag} needs a native model file, but transformers runs this model: leave it out"
            )


# The launcher makes these checks before a process starts, and `quadriga models check` reports them.

# Limits of worker_proc/cpu/csrc, which a test compares.
MAX_HEAD_DIM, MAX_GROUP_SIZE = 256, 128


def check_servable(
    files: ModelFiles, quantization: str = "none"
) -> decoder_config.DecoderConfig | None:
    """Return what the model asks of a native file; None if transformers runs it.

    Args:
        files: the model's files.
        quantization: value of --quantization.

    Raises:
        ModelError: the architecture, its options or the format of the weights are not supported.
    """
    impl = choose_model_impl(files)
    if quantization == "gguf" and files.weights is not None and files.tensor_index is not None:
        check_packed_types(files.weights, read_json(files.tensor_index))
    if files.weights is not None:
        _check_quantization(files, impl)
    return read_native(files) if impl is ModelImpl.NATIVE else None


def _check_quantization(files: ModelFiles, impl: ModelImpl) -> None:
    """Raise ModelError if the checkpoint is quantized in a way that is not supported."""
    try:
        quantization = read_quantization(files.config)
    except ModelError as error:
        raise ModelError(f"{files.location}: {error}") from None
    if quantization is not None and impl is not ModelImpl.NATIVE:
        raise ModelError(
            f"{files.location}: the weights are quantized ({quantization}), which only native model"
            " files read, and transformers runs this model; take the unquantized one"
        )


def check_tokenizer(files: ModelFiles, num_ids: int) -> None:
    """Raise ModelError if the tokenizer of --tokenizer has `num_ids` ids and the model fewer."""
    if not files.own_tokenizer and num_ids > files.vocab_size:
        raise ModelError(
            f"--tokenizer {files.tokenizer_dir} has {num_ids} ids, but the model only"
            f" {files.vocab_size}: it is the tokenizer of another model"
        )


def check_native_heads(
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_head_dim: int = MAX_HEAD_DIM,
    max_group_size: int = MAX_GROUP_SIZE,
) -> None:
    """Raise ModelError if the native kernels do not support heads of this size or number."""
    for text, value, limit in (
        ("heads of {}", head_dim, max_head_dim),
        ("{} query heads for each key head", heads // kv_heads, max_group_size),
    ):
        if value > limit:
            raise ModelError(
                f"the model has {text.format(value)}, the native kernels compute at most {limit};"
                " use --attention-backend torch"
            )


def find_served_model(config: server_config.ServerConfig, show_progress: bool) -> ModelFiles:
    """Find or fetch the files of the model that the flags name.

    Args:
        config: the server's flags.
        show_progress: print how far a download is.

    Raises:
        QuadrigaError: there is no such model, or it cannot be served with these flags.
    """
    model = resolve_model(config.model, show_progress=show_progress)
    check_servable(model, config.worker.quantization)
    check_flags(config.worker, choose_model_impl(model))
    return model
