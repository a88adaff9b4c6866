"""What a tenant sees of the server's info: what is served, and what itself has used."""

from collections.abc import Mapping
from typing import Any

# All other values say what others do, or how the server is run.
SHOWN_TO_TENANTS = frozenset(
    {
        "answer_format",
        "attention_backend",
        "chat",
        "chunked_prefill_size",
        "context_length",
        "cuda_graph",
        "default_max_tokens",
        "device",
        "dtype",
        "endpoint",
        "fill_format",
        "kernels",
        "max_batch_size",
        "max_frame_bytes",
        "max_queued_requests",
        "max_running_requests",
        "model",
        "model_details",
        "page_size",
        "prefix_cache",
        "protocol",
        "ready",
        "stream_interval",
        "vocab_size",
    }
)


def own_info(info: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """Return the values of the server's info that a tenant may see.

    Args:
        info: that of the server.
        tenant: name of the tenant.
    """
    shown = {name: value for name, value in info.items() if name in SHOWN_TO_TENANTS}
    usage = info.get("tenants") or {}
    return {**shown, "tenants": {tenant: usage[tenant]} if tenant in usage else {}}
