"""The model that a server is about to serve: found, and checked before any process starts."""

from quadriga.config.server_config import ServerConfig
from quadriga.model_files.model_impl.choice import choose_model_impl
from quadriga.model_files.model_impl.flags import check_flags
from quadriga.model_files.resolve import ModelFiles, resolve_model
from quadriga.model_files.servable import check_servable


def find_served_model(config: ServerConfig, show_progress: bool) -> ModelFiles:
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
