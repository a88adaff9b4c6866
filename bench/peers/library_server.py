"""Serve CTranslate2 or OpenVINO GenAI behind a streaming /v1/completions, with little else.

The file runs by itself in the environment of the library, where aiohttp is installed too.
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from tokenizers import Tokenizer

MODEL = "peer"
MAX_BATCH = 32
CACHE_GB = 4


class Waiting(NamedTuple):
    """A greedy request of exactly `max_tokens` tokens; `emit` gets new ids from any thread."""

    prompt: list[int]
    max_tokens: int
    emit: Callable[[list[int]], None]


def run_ctranslate2(arguments: argparse.Namespace, waiting: "queue.Queue[Waiting]") -> None:
    """Generate static batches: the requests that wait when a batch ends make the next one."""
    import ctranslate2

    generator = ctranslate2.Generator(
        str(arguments.model),
        device="cpu",
        compute_type=arguments.compute_type,
        intra_threads=arguments.threads,
    )
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    while True:
        batch = [waiting.get()]
        while len(batch) < MAX_BATCH and not waiting.empty():
            batch.append(waiting.get())
        length = max(request.max_tokens for request in batch)

        def on_step(step: Any, batch: list[Waiting] = batch) -> None:
            request = batch[step.batch_id]
            if step.step < request.max_tokens:
                request.emit([step.token_id])

        generator.generate_batch(
            [[tokenizer.id_to_token(token) for token in request.prompt] for request in batch],
            max_length=length,
            min_length=length,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=on_step,
        )


def run_openvino(arguments: argparse.Namespace, waiting: "queue.Queue[Waiting]") -> None:
    """Run steps of continuous batching; new requests join between two steps."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU")
    running: dict[int, tuple[Any, Waiting]] = {}
    number = 0
    while True:
        while not running or not waiting.empty():
            request = waiting.get()
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request.max_tokens
            config.ignore_eos = True
            ids = openvino.Tensor(np.array([request.prompt], np.int64))
            running[number] = (pipeline.add_request(number, ids, config), request)
            number += 1
        pipeline.step()
        for name, (handle, request) in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    request.emit(list(output.generated_ids))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del running[name]


ENGINES = {"ctranslate2": run_ctranslate2, "openvino": run_openvino}


class _Completions:
    """The handlers of HTTP requests."""

    def __init__(self, waiting: "queue.Queue[Waiting]", tokenizer: Tokenizer) -> None:
        self._waiting = waiting
        self._tokenizer = tokenizer

    async def models(self, _: web.Request) -> web.Response:
        size = self._tokenizer.get_vocab_size()
        return web.json_response({"data": [{"id": MODEL, "meta": {"n_vocab": size}}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, max_tokens = body["prompt"], body["max_tokens"]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        arrived: asyncio.Queue[list[int]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(ids: list[int]) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, ids)

        self._waiting.put(Waiting(prompt, max_tokens, emit))
        generated = 0
        while generated < max_tokens:
            ids = await arrived.get()
            generated += len(ids)
            reason = "length" if generated >= max_tokens else None
            choice = {"index": 0, "text": self._tokenizer.decode(ids), "finish_reason": reason}
            await answer.write(_event({"choices": [choice]}))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": generated}
        await answer.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return answer


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=ENGINES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--compute-type")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    requests: queue.Queue[Waiting] = queue.Queue()
    engine = ENGINES[arguments.library]
    threading.Thread(target=engine, args=(arguments, requests), daemon=True).start()
    completions = _Completions(requests, Tokenizer.from_file(str(arguments.tokenizer)))
    app = web.Application()
    app.router.add_get("/v1/models", completions.models)
    app.router.add_post("/v1/completions", completions.answer)
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None)
