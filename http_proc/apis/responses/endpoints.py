"""The table of the Responses API's endpoints."""

from http_proc.apis.responses.create import create_response
from http_proc.apis.responses.schema import RESPONSES, ResponseObject, ResponsesRequest
from http_proc.apis.responses.stored.endpoints import STORED_ENDPOINTS
from http_proc.endpoints.endpoint import post
from http_proc.streams.resumable import resumable

RESPONSES_ENDPOINTS = [
    post("/v1/responses", resumable(create_response), "Answer a conversation with output items",
         ResponsesRequest, ResponseObject, sampling=RESPONSES, streams=True),
    *STORED_ENDPOINTS,
]  # fmt: skip
