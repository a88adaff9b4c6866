"""LoRA adapters of an LLM, named as in vLLM."""

from pathlib import Path
from typing import Any, NamedTuple

from quadriga.errors import ConfigError


class LoRARequest(NamedTuple):
    """The adapter that answers a request of an LLM.

    Attributes:
        lora_name: its name, which a path belongs to from the first request on.
        lora_int_id: ignored: an adapter is known by its content.
        lora_path: a PEFT directory or a GGUF file; "": it is loaded already.
        pinned: it keeps its place in the worker from now on; False: it stays as it is.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    pinned: bool = False


def load_adapter(info: dict[str, Any], request: LoRARequest) -> str:
    """Load the adapter of a request into a server of this machine, if that is to be done.

    Args:
        info: of the server.
        request: names the adapter.

    Returns:
        The name of the adapter.

    Raises:
        ConfigError: the server was started without adapters.
        InvalidRequest: the files are no adapter of the model, the name has other ones, or too many
            adapters are pinned.
    """
    if not request.lora_path:
        return request.lora_name
    directory = info.get("adapter_directory")
    if not directory:
        raise ConfigError("lora_request has a path: make the LLM with enable_lora=True")
    # Imported here, as most programs load no adapter.
    from quadriga.server.config.engine_args import ModelArgs
    from quadriga.server.models.adapters.store import AdapterStore

    args = ModelArgs(enable_lora=True, max_lora_rank=int(info["max_lora_rank"]))
    max_loras = int(info["adapters"]["max"])
    store = AdapterStore(Path(directory), Path(info["adapter_copies"]), args, max_loras)
    store.load(request.lora_name, request.lora_path, pinned=True if request.pinned else None)
    return request.lora_name
