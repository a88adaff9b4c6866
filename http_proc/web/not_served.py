"""Endpoints that other servers have and this one does not: what the 404 says to do instead."""

from typing import NamedTuple


class NotServed(NamedTuple):
    """Endpoints of one purpose.

    Attributes:
        paths: their paths; one with a slash at its end stands for all below it, too.
        reason: what is not served here, and the remedy.
    """

    paths: tuple[str, ...]
    reason: str


NOT_SERVED = (
    NotServed(
        ("/v1/audio/", "/v1/realtime/"),
        "speech is not served: the models read and write text. Run a server of Whisper or of a"
        " speech model beside this one",
    ),
    NotServed(
        ("/v1/images/", "/v1/videos/"),
        "images and videos are not served: the models read and write text. vLLM and SGLang have"
        " models that see, and diffusion servers draw",
    ),
    NotServed(
        ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/score",
         "/v1/score", "/classify", "/v1/classify", "/predict", "/pooling"),
        "heads that classify or rank are not served: POST /v1/embeddings returns vectors, whose"
        " products rank texts, and POST /v1/decisions the probabilities of given answers",
    ),
    NotServed(
        ("/v1/moderations",),
        "moderation is not served: ask a guard model by POST /v1/chat/completions, or"
        " POST /v1/decisions for the probability of each label",
    ),
    NotServed(
        ("/v1/fine_tuning/", "/v1/evals/"),
        "training and evaluations are not served: train elsewhere, and start the server with"
        " --model DIRECTORY",
    ),
    NotServed(
        ("/v1/assistants/", "/v1/threads/"),
        "assistants are not served: POST /v1/responses keeps conversations and calls tools",
    ),
    NotServed(
        ("/v1/vector_stores/", "/v1/containers/"),
        "stores for searches and containers are not served: make vectors by POST /v1/embeddings,"
        " and run tools in the client",
    ),
    NotServed(
        ("/v1/uploads/",),
        "uploads in parts are not served: POST /v1/files takes 200 MiB at once",
    ),
    NotServed(
        ("/v1/messages/batches/",),
        "batches of messages are not served: POST /v1/batches takes lines for"
        " /v1/chat/completions, /v1/completions and /v1/responses",
    ),
    NotServed(
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter",
         "/unload_lora_adapter", "/lora-adapters"),
        "LoRA adapters are not served: merge the adapter into its model, and start the server with"
        " --model DIRECTORY",
    ),
    NotServed(
        ("/api/blobs/", "/models/load", "/models/unload"),
        "models are not managed by HTTP: the server serves the one of --model, which its start"
        " fetches; `quadriga models` lists those of the machine",
    ),
    NotServed(
        ("/update_weights_from_disk", "/sleep", "/wake_up", "/release_memory_occupation"),
        "the model is not changed by HTTP: SIGHUP reloads it, and a stop frees its memory",
    ),
    NotServed(
        ("/start_profile", "/stop_profile"),
        "no profile is taken by HTTP: GET /v1/requests/ID/trace shows where a request's time went",
    ),
    NotServed(("/completion", "/completions"), "use POST /v1/completions"),
    NotServed(("/chat/completions",), "use POST /v1/chat/completions"),
    NotServed(("/responses",), "use POST /v1/responses"),
    NotServed(("/embedding", "/embeddings", "/encode"), "use POST /v1/embeddings"),
    NotServed(("/apply-template",), "use POST /render"),
    NotServed(("/models",), "use GET /v1/models"),
    NotServed(
        ("/props", "/slots", "/get_model_info", "/get_server_info", "/model_info", "/version",
         "/load"),
        "use GET /server_info",
    ),
    NotServed(("/health_generate",), "use GET /readyz"),
    NotServed(("/ping",), "use GET /livez"),
    NotServed(("/reset_prefix_cache",), "use POST /flush_cache"),
)  # fmt: skip


def reason_of(path: str) -> str | None:
    """Return what to do in place of a request; None for a path that no known server has."""
    for endpoints in NOT_SERVED:
        for known in endpoints.paths:
            if path.rstrip("/") == known.rstrip("/"):
                return endpoints.reason
            if known.endswith("/") and path.startswith(known):
                return endpoints.reason
    return None
