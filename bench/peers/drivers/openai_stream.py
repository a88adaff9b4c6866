"""Serve a streaming /v1/completions around an engine of token ids, with as little as possible.

It runs in the environment of a library that has no server, where aiohttp is installed too.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from aiohttp import web
from tokenizers import Tokenizer

MODEL = "peer"
Emit = Callable[[list[int]], None]


class CompletionEngine(Protocol):
    """An engine that generates from token ids."""

    def submit(self, prompt: list[int], max_tokens: int, emit: Emit) -> None:
        """Queue a greedy request of exactly `max_tokens` tokens.

        `emit` is called from any thread with new ids as soon as they are generated.
        """


def serve(engine: CompletionEngine, tokenizer: Path, port: int) -> None:
    """Serve until a signal arrives."""
    app = web.Application()
    completions = _Completions(engine, Tokenizer.from_file(str(tokenizer)))
    app.router.add_get("/v1/models", completions.models)
    app.router.add_post("/v1/completions", completions.answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


class _Completions:
    def __init__(self, engine: CompletionEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def models(self, _: web.Request) -> web.Response:
        size = self._tokenizer.get_vocab_size()
        return web.json_response({"data": [{"id": MODEL, "meta": {"n_vocab": size}}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, wanted = body["prompt"], body["max_tokens"]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        queue: asyncio.Queue[list[int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(ids: list[int]) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, ids)

        self._engine.submit(prompt, wanted, emit)
        made = 0
        while made < wanted:
            ids = await queue.get()
            made += len(ids)
            reason = "length" if made >= wanted else None
            choice = {"index": 0, "text": self._tokenizer.decode(ids), "finish_reason": reason}
            await answer.write(_event({"choices": [choice]}))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": made}
        await answer.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return answer


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
