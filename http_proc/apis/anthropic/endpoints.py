"""The table of Anthropic's endpoints."""

from typing import Any

from http_proc.apis.anthropic.answer import MessageBody, TokenCount
from http_proc.apis.anthropic.errors import MessageErrorBody, error_body
from http_proc.apis.anthropic.messages import count_tokens, messages
from http_proc.apis.anthropic.request_types import SAMPLING, CountTokensRequest, MessagesRequest
from http_proc.endpoints.endpoint import post
from http_proc.streams.resumable import resumable

_ERRORS: dict[str, Any] = {"error_body": error_body, "error": MessageErrorBody}

ANTHROPIC_ENDPOINTS = [
    post("/v1/messages", resumable(messages), "Answer a conversation, in Anthropic's format",
         MessagesRequest, MessageBody, sampling=SAMPLING, streams=True, **_ERRORS),
    post("/v1/messages/count_tokens", count_tokens, "Number of tokens of a conversation",
         CountTokensRequest, TokenCount, **_ERRORS),
]  # fmt: skip
