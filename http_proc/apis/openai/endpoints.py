"""The table of OpenAI's endpoints that take prompts and chats."""

from http_proc.apis.openai.chat import chat_completions
from http_proc.apis.openai.completions import completions
from http_proc.apis.openai.render import RenderAnswer, RenderRequest, render
from http_proc.endpoints.endpoint import post
from http_proc.protocol.sampling import CHAT, OPENAI
from http_proc.protocol.schema import ChatBody, ChatRequest, CompletionBody, CompletionRequest
from http_proc.streams.resumable import resumable

OPENAI_ENDPOINTS = [
    post("/v1/completions", resumable(completions), "Complete prompts",
         CompletionRequest, CompletionBody, sampling=OPENAI, streams=True),
    post("/v1/chat/completions", resumable(chat_completions), "Answer a chat",
         ChatRequest, ChatBody, sampling=CHAT, streams=True),
    post("/render", render, "The prompt of a text or a chat, as text and token ids",
         RenderRequest, RenderAnswer, sampling=CHAT),
]  # fmt: skip
