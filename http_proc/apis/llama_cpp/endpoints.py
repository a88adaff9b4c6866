"""The table of llama.cpp's endpoints."""

from http_proc.apis.llama_cpp.bodies import (
    InfillAnswer,
    InfillRequest,
    LlamaCppErrorAnswer,
    error_body,
)
from http_proc.apis.llama_cpp.infill import LLAMA_CPP, infill
from http_proc.endpoints.endpoint import post

LLAMA_CPP_ENDPOINTS = [
    post("/infill", infill, "Fill the gap between two texts, in llama.cpp's format",
         InfillRequest, InfillAnswer, sampling=LLAMA_CPP, streams=True,
         error_body=error_body, error=LlamaCppErrorAnswer),
]  # fmt: skip
