"""Kill each process under a batch in turn, and the whole server, and count the batch's lines.

python -m tests.faults.batch_kills [--lines 2000] [--kills 12]

The batch goes on after each kill. A line without an answer is lost, one with several is doubled.
All lines have one prompt and are greedy, so that their texts are equal. Exit codes: 0 every line
has one answer, 1 not.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import psutil

from bench.client.server import free_port
from tests.faults.kill_matrix import PROCESSES
from tests.integration.test_batches import connect, flags, input_file, num_completed, start
from tests.server import kill_tree, launch, wait_until, wait_until_ready
from tests.tiny_models import tiny_llama

TIMEOUT_S = 300.0
EVERYTHING = "everything"


class BatchUnderKills:
    """A server with one batch, whose processes are killed."""

    def __init__(self, directory: Path, num_lines: int) -> None:
        self._directory = directory
        self._num_lines = num_lines
        self._port = free_port()
        self._model = tiny_llama(directory / "model")
        self._client = connect(self._port)
        self._num_starts = 0
        self._process = self._launch()
        path = input_file(directory / "in.jsonl", num_lines)
        self._batch_id = start(self._client, path)

    def _launch(self) -> "subprocess.Popen[bytes]":
        self._num_starts += 1
        log = self._directory / f"log-{self._num_starts}"
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        server_flags = flags(self._model, self._directory / "data", self._port)
        process = launch(endpoint, *server_flags, log=log)
        wait_until_ready(process, log)
        return process

    @property
    def num_completed(self) -> int:
        """Number of lines that are answered; 0 while no gateway says it."""
        return num_completed(self._client, self._batch_id)

    def wait_for_lines(self, count: int) -> None:
        """Wait until so many lines are answered."""
        wait_until(lambda: self.num_completed >= count, TIMEOUT_S)

    def kill(self, victim: str) -> None:
        """Kill a process, or all at once, which are then started again."""
        if victim == EVERYTHING:
            kill_tree(self._process)
            self._process = self._launch()
            return
        for child in psutil.Process(self._process.pid).children():
            if victim in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)

    def answers(self) -> list[dict[str, object]]:
        """Return the lines of the output file, when the batch has ended."""
        self.wait_for_lines(self._num_lines)
        batches = self._client.batches
        wait_until(lambda: batches.retrieve(self._batch_id).status == "completed", TIMEOUT_S)
        output = batches.retrieve(self._batch_id).output_file_id
        assert output is not None
        return [json.loads(line) for line in self._client.files.content(output).text.splitlines()]

    def close(self) -> None:
        """End the server."""
        kill_tree(self._process)


def run(directory: Path, num_lines: int, num_kills: int) -> bool:
    """Kill `num_kills` times at even distances, print the counts, and return if all is well."""
    batch = BatchUnderKills(directory, num_lines)
    began_at = time.monotonic()
    try:
        victims = islice(cycle((*PROCESSES, EVERYTHING)), num_kills)
        for number, victim in enumerate(victims, start=1):
            batch.wait_for_lines(number * num_lines // (num_kills + 1))
            print(f"{batch.num_completed} of {num_lines} lines: kill {victim}", flush=True)
            batch.kill(victim)
        answers = batch.answers()
    finally:
        batch.close()
    counts = Counter(str(answer["custom_id"]) for answer in answers)
    num_lost = sum(f"line-{number}" not in counts for number in range(num_lines))
    num_doubled = sum(count - 1 for count in counts.values())
    texts = {json.dumps(answer["response"]["body"]["choices"][0]["text"]) for answer in answers}  # type: ignore[index]
    print(
        f"{num_lines} lines, {num_kills} kills: {num_lost} lost, {num_doubled} doubled,"
        f" {len(texts)} different texts; {time.monotonic() - began_at:.0f} s"
    )
    return not num_lost and not num_doubled and len(texts) == 1


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser("tests.faults.batch_kills", description=__doc__)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batch-kills-") as directory:
        return 0 if run(Path(directory), arguments.lines, arguments.kills) else 1


if __name__ == "__main__":
    sys.exit(main())
