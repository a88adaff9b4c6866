"""Serve OpenVINO GenAI's continuous batching behind a streaming /v1/completions."""

import argparse
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openai_stream import Emit, serve


class OpenVINOEngine:
    """One thread that runs the steps; new requests join between two steps."""

    def __init__(self, model: Path) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self._waiting: queue.Queue[tuple[list[int], int, Emit]] = queue.Queue()
        self._running: dict[int, tuple[Any, Emit]] = {}
        self._next = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], max_tokens: int, emit: Emit) -> None:
        """Queue a request."""
        self._waiting.put((prompt, max_tokens, emit))

    def _run(self) -> None:
        while True:
            self._admit(block=not self._running)
            self._pipeline.step()
            for number, (handle, emit) in list(self._running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        emit(list(output.generated_ids))
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    del self._running[number]

    def _admit(self, block: bool) -> None:
        while block or not self._waiting.empty():
            prompt, max_tokens, emit = self._waiting.get()
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = max_tokens
            config.ignore_eos = True
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handle = self._pipeline.add_request(self._next, ids, config)
            self._running[self._next] = (handle, emit)
            self._next += 1
            block = False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    serve(OpenVINOEngine(arguments.model), arguments.tokenizer, arguments.port)
