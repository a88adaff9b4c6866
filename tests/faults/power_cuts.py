"""Cut the power under a batch and resumable streams, and check every answer.

    python -m tests.faults.power_cuts [--lines 2000] [--streams 32] [--cuts 3] [--seed 0]

At a power cut all processes are killed at once, and the journal of the scheduler loses up to 4 KiB
of its end, which may not have been synced. The next server resumes with
`--resume`. In the end each line of the batch must have one answer, and each stream (chats,
completions, responses, responses in the background) the events of an undisturbed run.
"""

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai

from bench.client.server import free_port
from scheduler_proc.durability.journal_opening import FILE_NAME
from tests.faults.restarts import Restarts, resumed_server
from tests.faults.resumed_streams import Answer, ResumedStreams
from tests.tiny_models import tiny_llama
from tests.waiting import wait_until

URL: Any = "/v1/completions"
# The prompts of the batch take turns, so that their answers are known after a few lines.
NUM_PROMPTS = 8
LINE_TOKENS = 48
MAX_TORN_BYTES = 4096
TIMEOUT_S = 900.0


class PowerCuts:
    """A server with a batch and streams, whose power is cut.

    Args:
        directory: for the state of the server, its logs and the files of the batch.
        model: directory of the model.
        num_lines: of the batch.
        num_streams: beside the batch.
    """

    def __init__(self, directory: Path, model: Path, num_lines: int, num_streams: int) -> None:
        self._directory = directory
        self._num_lines = num_lines
        self._num_streams = num_streams
        self._port = free_port()
        self._endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._url = f"http://127.0.0.1:{self._port}"
        self._client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", timeout=20)
        self._flags = [
            "--model", str(model), "--dtype", "float32", "--worker-threads", "1",
            "--max-total-tokens", "16384", "--port", str(self._port),
            "--journal", str(directory / "state"), "--data-dir", str(directory / "state"),
            "--served-model-name", "tiny", "--batch-concurrency", "4",
        ]  # fmt: skip

    def run(self, num_cuts: int, chance: random.Random) -> str:
        """Cut the power so many times, and return a line of what was found.

        Raises:
            AssertionError: an answer is missing, doubled, or another one than undisturbed.
        """
        (self._directory / "state").mkdir()
        with resumed_server(self._directory, self._endpoint, self._flags) as servers:
            expected = asyncio.run(self._streams().run())
            bad = [answer for answer in expected if isinstance(answer, Exception)]
            assert not bad, bad[0]
            batch_id = self._start_batch()
            num_resumed = 0
            for number in range(num_cuts):
                share = (number + chance.random()) / num_cuts
                self._wait_for_lines(batch_id, int(share * self._num_lines))
                answers, load = asyncio.run(self._cut_under_streams(servers, chance))
                different = [n for n, answer in enumerate(answers) if answer != expected[n]]
                assert not different, f"streams {different}: {answers[different[0]]}"
                num_resumed += load.num_resumed
            self._check_batch(batch_id)
        return (
            f"{num_cuts} power cuts: {self._num_lines} lines and {num_cuts} times"
            f" {self._num_streams} streams have one answer each, {num_resumed} connections were"
            " resumed; 0 lost, doubled, different"
        )

    def _streams(self) -> ResumedStreams:
        return ResumedStreams(self._url, TIMEOUT_S, self._num_streams)

    async def _cut_under_streams(
        self, servers: Restarts, chance: random.Random
    ) -> tuple[list[Answer | Exception], ResumedStreams]:
        load = self._streams()
        streams = asyncio.create_task(load.run())
        await load.started.wait()
        await asyncio.to_thread(
            servers.disturb_all, signal.SIGKILL, lambda: self._lose_data(chance)
        )
        return await streams, load

    def _lose_data(self, chance: random.Random) -> None:
        """Cut off the end of the journal, as far as it may not have been synced."""
        journal = self._directory / "state" / FILE_NAME
        size = journal.stat().st_size
        torn = min(chance.randrange(MAX_TORN_BYTES), size // 2)
        with journal.open("rb+") as file:
            file.truncate(size - torn)

    # --- the batch --------------------------------------------------------------------------------

    def _start_batch(self) -> str:
        path = self._directory / "in.jsonl"
        with path.open("w") as file:
            for number in range(self._num_lines):
                body = {
                    "prompt": [5, 6, 7 + number % NUM_PROMPTS], "max_tokens": LINE_TOKENS,
                    "ignore_eos": True, "temperature": 0,
                }  # fmt: skip
                line = {"custom_id": str(number), "method": "POST", "url": URL, "body": body}
                file.write(json.dumps(line) + "\n")
        with path.open("rb") as file:
            uploaded = self._client.files.create(file=file, purpose="batch")
        return self._client.batches.create(
            input_file_id=uploaded.id, endpoint=URL, completion_window="24h"
        ).id

    def _num_completed(self, batch_id: str) -> int:
        try:
            counts = self._client.batches.retrieve(batch_id).request_counts
        except openai.APIError:  # the next gateway is not there yet
            return -1
        return counts.completed if counts else 0

    def _wait_for_lines(self, batch_id: str, count: int) -> None:
        wait_until(lambda: self._num_completed(batch_id) >= count, TIMEOUT_S)

    def _check_batch(self, batch_id: str) -> None:
        self._wait_for_lines(batch_id, self._num_lines)
        wait_until(lambda: self._client.batches.retrieve(batch_id).status == "completed", 30)
        batch = self._client.batches.retrieve(batch_id)
        assert batch.output_file_id and not batch.error_file_id, batch
        lines = self._client.files.content(batch.output_file_id).text.splitlines()
        answers: list[Any] = [json.loads(line) for line in lines]
        times = Counter(int(answer["custom_id"]) for answer in answers)
        assert times == Counter(range(self._num_lines)), "a line is missing, or there twice"
        texts = {
            (
                int(answer["custom_id"]) % NUM_PROMPTS,
                answer["response"]["body"]["choices"][0]["text"],
            )
            for answer in answers
        }
        assert len(texts) == NUM_PROMPTS, "a prompt has two greedy answers"


def _text(answer: Any) -> str:
    text: str = answer["response"]["body"]["choices"][0]["text"]
    return text


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.faults.power_cuts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in (("lines", 2000), ("streams", 32), ("cuts", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    arguments = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="power-"))
    began_at = time.monotonic()
    model = tiny_llama(directory / "model")
    cuts = PowerCuts(directory, model, arguments.lines, arguments.streams)
    try:
        print(cuts.run(arguments.cuts, random.Random(arguments.seed)))
    except AssertionError as error:
        print(f"{error}; logs are in {directory}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - began_at:.0f} s")
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
