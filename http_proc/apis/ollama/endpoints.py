"""The table of Ollama's endpoints."""

from typing import Any

from http_proc.apis.ollama import chat, generate, models
from http_proc.apis.ollama.answers import (
    OllamaChatAnswer,
    OllamaError,
    OllamaGenerateAnswer,
    error_body,
)
from http_proc.apis.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from http_proc.endpoints.endpoint import LINES, Endpoint, post

_ERRORS: dict[str, Any] = {"error_body": error_body, "error": OllamaError}

OLLAMA_ENDPOINTS = [
    post("/api/chat", chat.ollama_chat_answer, "Answer a chat, in Ollama's format",
         OllamaChatRequest, OllamaChatAnswer, streams=True, stream_type=LINES, **_ERRORS),
    post("/api/generate", generate.ollama_generate, "Answer a prompt, in Ollama's format",
         OllamaGenerateRequest, OllamaGenerateAnswer, streams=True, stream_type=LINES, **_ERRORS),
    post("/api/show", models.show, "Describe the model, in Ollama's format",
         OllamaShowRequest, models.OllamaShowAnswer, **_ERRORS),
    Endpoint("/api/tags", models.tags, "The model that is served, in Ollama's format",
             models.OllamaModelList, **_ERRORS),
    Endpoint("/api/ps", models.ps, "The model that is loaded, in Ollama's format",
             models.OllamaLoadedModels, **_ERRORS),
    Endpoint("/api/version", models.version, "The version of Ollama whose API this is",
             models.OllamaVersion, **_ERRORS),
    *(Endpoint(f"/api/{name}", models.absent, "Not offered", None,
               method="delete" if name == "delete" else "post", **_ERRORS)
      for name in models.ABSENT),
]  # fmt: skip
