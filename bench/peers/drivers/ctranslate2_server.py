"""Serve CTranslate2 behind a streaming /v1/completions.

Its batches are static: the requests that wait when a batch ends make the next one.
"""

import argparse
import queue
import threading
from pathlib import Path

import ctranslate2
from openai_stream import Emit, serve
from tokenizers import Tokenizer

MAX_BATCH = 32


class CTranslate2Engine:
    """One thread that generates batches of the waiting requests."""

    def __init__(self, model: Path, tokenizer: Path, compute_type: str, threads: int) -> None:
        self._generator = ctranslate2.Generator(
            str(model), device="cpu", compute_type=compute_type, intra_threads=threads
        )
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._waiting: queue.Queue[tuple[list[int], int, Emit]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], max_tokens: int, emit: Emit) -> None:
        """Queue a request."""
        self._waiting.put((prompt, max_tokens, emit))

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            self._generate(batch)

    def _generate(self, batch: list[tuple[list[int], int, Emit]]) -> None:
        length = max(max_tokens for _, max_tokens, _ in batch)

        def on_step(step: ctranslate2.GenerationStepResult) -> None:
            _, max_tokens, emit = batch[step.batch_id]
            if step.step < max_tokens:
                emit([step.token_id])

        self._generator.generate_batch(
            [[self._tokenizer.id_to_token(token) for token in prompt] for prompt, _, _ in batch],
            max_length=length,
            min_length=length,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=on_step,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--compute-type", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    engine = CTranslate2Engine(
        arguments.model, arguments.tokenizer, arguments.compute_type, arguments.threads
    )
    serve(engine, arguments.tokenizer, arguments.port)
