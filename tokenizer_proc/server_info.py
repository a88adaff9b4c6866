"""What the front door contributes to Info: how the server was started."""

from quadriga.config.server_config import ServerConfig
from quadriga.model_files.resolve import ModelFiles
from quadriga.wire.messages.public import MAX_FRAME_BYTES, PROTOCOL_VERSION, InfoValues
from tokenizer_proc.preparation.chat import ChatTemplate


def static_server_info(
    config: ServerConfig, model: ModelFiles, chat: ChatTemplate, pids: dict[str, int]
) -> InfoValues:
    """As docs/protocol.md lists them."""
    return {
        "protocol": PROTOCOL_VERSION,
        "model": config.model.shown_name,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "max_frame_bytes": MAX_FRAME_BYTES,
        "max_batch_size": config.scheduler.max_batch_size,
        "prefill_max_batch_size": config.scheduler.prefill_width,
        "max_running_requests": config.scheduler.max_running_requests,
        "max_queued_requests": config.scheduler.max_queued_requests,
        "chat": chat.exists,
        "tool_format": chat.tool_format,
        "tokenize_workers": config.frontend.tokenize_workers,
        "stream_interval": config.detok.stream_interval,
        "pids": dict(pids),
    }
