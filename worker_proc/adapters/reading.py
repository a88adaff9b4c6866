"""Read an adapter for a model: its files say which format it has."""

import logging
from pathlib import Path

from quadriga.errors import ModelError
from quadriga.server.models.adapters.content import AdapterContent
from quadriga.server.models.adapters.peft_config import CONFIG_NAME, PeftConfig
from quadriga.server.models.formats.directory import read_config
from quadriga.server.models.resolve import ModelFiles
from worker_proc.adapters.base_tensors import BaseTensors
from worker_proc.adapters.change import Adapter
from worker_proc.adapters.gguf_file import read_gguf
from worker_proc.adapters.peft_files import read_peft
from worker_proc.adapters.places import Places

# Sizes of config.json that two models of one adapter share.
_SIZES = ("model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer")


def read_adapter(
    content: AdapterContent, places: Places, files: ModelFiles, max_rank: int | None = None
) -> Adapter:
    """Return an adapter for a model, or for the part of it that this rank has.

    Args:
        content: the adapter's files.
        places: of the model.
        files: the model's files.
        max_rank: the largest rank that is served; None: there is no limit.

    Raises:
        ModelError: the adapter is broken, or does not fit the model.
    """
    try:
        if content.config is None:
            adapter = read_gguf(content, places, files.config, max_rank)
        else:
            _check_base(content.config, files)
            base = BaseTensors(files, places.config)
            adapter = read_peft(content, places, base, max_rank)
        if not all(bool(tensor.isfinite().all()) for tensor in adapter.tensors()):
            raise ModelError("its numbers overflow in float32; train it again")
        return adapter
    except ModelError as error:
        raise ModelError(f"the adapter {content.path}: {error}") from None


def _check_base(config: PeftConfig, files: ModelFiles) -> None:
    """Raise ModelError if the adapter names a base here whose sizes are others; log its name."""
    if not config.base or config.base in (files.name, files.location):
        return
    directory = Path(config.base).expanduser()
    if (directory / "config.json").is_file():
        named = read_config(directory)
        theirs, ours = ({key: c.get(key) for key in _SIZES} for c in (named, files.config))
        if theirs != ours:
            raise ModelError(
                f"its {CONFIG_NAME} names the base {config.base}, which has {_shown(theirs)}; the"
                f" model {files.name} has {_shown(ours)}: serve it with its own base"
            )
    logging.info("an adapter names the base %s; the model is %s", config.base, files.name)


def _shown(sizes: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sizes.items() if value is not None)
