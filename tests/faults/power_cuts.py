"""Cut the power under a batch and resumable streams, and check every answer.

    python -m tests.faults.power_cuts [--lines 2000] [--streams 32] [--cuts 3] [--seed 0]

At a power cut all processes are killed at once, and every file of the server (journal, rows of
streams, stored responses, their write-ahead logs, batches, files) loses what was not synced: all of
it, or for some files a part, as chance has it. The next server resumes with `--resume`. In the end
each line of the batch must have one answer, each stream (chats, completions, responses, responses
in the background) the events of an undisturbed run, and what was acknowledged to a client
(responses, conversations, files, and their removal) must be as it was.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai

from bench.client.server import free_port
from tests.faults.restarts import Restarts, resumed_server
from tests.faults.resumed_streams import Answer, ResumedStreams
from tests.tiny_models import tiny_llama
from tests.waiting import wait_until

URL: Any = "/v1/completions"
# The prompts of the batch take turns, so that their answers are known after a few lines.
NUM_PROMPTS = 8
LINE_TOKENS = 48
TIMEOUT_S = 900.0
MIN_ACKNOWLEDGED = 12
LIBRARY = Path(__file__).with_name("power_cut.c")

# What a test says that is skipped where a power cut cannot be played.
NO_POWER_CUTS = (
    "" if sys.platform == "linux" and shutil.which("cc") else "needs Linux and a C compiler"
)


class DurableDisk:
    """A directory whose files lose at a power cut what was not synced.

    Args:
        root: the directory, which is taken as durable with all that it has now.
        scratch: directory for what is durable.

    Attributes:
        environment: variables of the processes that write to the directory.
    """

    def __init__(self, root: Path, scratch: Path) -> None:
        self._root = root.resolve()
        self._kept = scratch / "kept"
        library = scratch / "power_cut.so"
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(LIBRARY), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.environment = {
            "LD_PRELOAD": str(library),
            "DURABLE_ROOT": str(self._root),
            "DURABLE_DIR": str(self._kept),
        }
        self._keep_all()

    def _keep_all(self) -> None:
        """Make durable what there is."""
        shutil.rmtree(self._kept, ignore_errors=True)
        self._kept.mkdir()
        program = (
            "import os, sys\n"
            "for path, _, names in os.walk(sys.argv[1]):\n"
            "    for one in [path, *(os.path.join(path, name) for name in names)]:\n"
            "        fd = os.open(one, os.O_RDONLY); os.fsync(fd); os.close(fd)\n"
        )
        environment = {**os.environ, **self.environment}
        command = [sys.executable, "-c", program, str(self._root)]
        subprocess.run(command, env=environment, check=True, timeout=60)

    def cut(self, chance: random.Random | None = None) -> None:
        """Lose what was not synced; with `chance`, some files keep a part or all of it."""
        fresh = self._root.with_name(self._root.name + ".after")
        self._restore(self._root, fresh, self._names_of(self._root), chance)
        shutil.rmtree(self._root)
        fresh.rename(self._root)
        self._keep_all()

    def _names_of(self, directory: Path) -> list[tuple[str, str, str]]:
        """Return kind, key and name of all that is durable in the root."""
        return self._names(self._key(directory))

    def _names(self, key: str) -> list[tuple[str, str, str]]:
        listing = self._kept / f"d-{key}"
        lines = listing.read_text().splitlines() if listing.exists() else []
        return [(kind, key, name) for kind, key, name in (line.split(" ", 2) for line in lines)]

    def _key(self, path: Path) -> str:
        found = subprocess.run(
            ["stat", "-c", "%i %W %w", path], capture_output=True, check=True, text=True
        ).stdout
        number, seconds, _, clock, *_ = found.split()
        return f"{number}-{seconds}.{int(clock.partition('.')[2])}"

    def _restore(
        self,
        source: Path,
        target: Path,
        names: list[tuple[str, str, str]],
        chance: random.Random | None,
    ) -> None:
        target.mkdir(mode=0o700)
        for kind, key, name in names:
            if kind == "d":
                self._restore(source / name, target / name, self._names(key), chance)
                continue
            kept = self._kept / f"f-{key}"
            data = kept.read_bytes() if kept.exists() else b""
            present = source / name
            if chance is not None and present.exists() and self._key(present) == key:
                data = _torn(data, present.read_bytes(), chance)
            path = target / name
            path.touch(0o600)
            path.write_bytes(data)


def _torn(durable: bytes, written: bytes, chance: random.Random) -> bytes:
    """Return what a file may have: what is durable, all that was written, or the begin of it."""
    kind = chance.randrange(3)
    if kind == 0 or not written.startswith(durable):
        return written if kind == 1 else durable
    return written[: chance.randint(len(durable), len(written))]


class AcknowledgedWrites:
    """What a client has stored until the server died, and removed again.

    Args:
        url: of the API, with /v1.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._responses: dict[str, str | None] = {}
        self._talks: dict[str, list[str] | None] = {}
        self._files: dict[str, bytes | None] = {}
        self._error: openai.APIError | None = None
        self.num_acknowledged = 0
        self._thread.start()

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self._url, api_key="none", timeout=30, max_retries=0)

    def _write(self) -> None:
        number = 0
        with self._client() as client:
            try:
                while not self._is_over.is_set():
                    self._write_one(client, number)
                    number += 1
            except openai.APIConnectionError:
                return  # the server is dead
            except openai.APIError as error:
                self._error = error

    def _write_one(self, client: openai.OpenAI, number: int) -> None:
        text = f"word {number}"
        response = client.responses.create(model="tiny", input=text, max_output_tokens=4)
        self._responses[response.id] = response.output_text
        item: Any = {"type": "message", "role": "user", "content": text}
        talk = client.conversations.create(items=[item]).id
        self._talks[talk] = [text]
        del self._talks[talk]  # the second turn may be there before it is acknowledged
        client.conversations.items.create(talk, items=[item])
        self._talks[talk] = [text, text]
        data = json.dumps({"custom_id": text}).encode()
        file = client.files.create(file=("in.jsonl", data), purpose="batch").id
        self._files[file] = data
        self.num_acknowledged += 4
        if number % 2:
            for known, remove in (
                (self._responses, client.responses.delete),
                (self._talks, client.conversations.delete),
                (self._files, client.files.delete),
            ):
                name = next(iter(known))
                del known[name]  # the removal is not acknowledged yet
                remove(name)
                known[name] = None
                self.num_acknowledged += 1

    def wait_for(self, count: int) -> None:
        """Wait until so many writes are acknowledged."""

        def has_enough() -> bool:
            assert self._error is None, self._error
            assert self._thread.is_alive()
            return self.num_acknowledged >= count

        wait_until(has_enough, TIMEOUT_S)

    def stop(self) -> None:
        """Write no more."""
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a request hangs"

    def check(self) -> None:
        """Raise AssertionError unless all is there at the next server as it was acknowledged."""
        with self._client() as client:
            reads: list[tuple[dict[str, Any], Any]] = [
                (self._responses, lambda name: client.responses.retrieve(name).output_text),
                (self._talks, lambda name: _texts(client, name)),
                (self._files, lambda name: client.files.content(name).content),
            ]
            for known, read in reads:
                for name, expected in known.items():
                    try:
                        found = read(name)
                    except openai.NotFoundError:
                        found = None
                    assert found == expected, f"{name} is {found!r}, and was {expected!r}"


def _texts(client: openai.OpenAI, talk: str) -> list[str]:
    items: Any = client.conversations.items.list(talk, order="asc").data
    return [item.content[0].text for item in items]


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
        disk = DurableDisk(self._directory / "state", self._directory)
        with resumed_server(
            self._directory, self._endpoint, self._flags, disk.environment
        ) as servers:
            expected = asyncio.run(self._streams().run())
            bad = [answer for answer in expected if isinstance(answer, Exception)]
            assert not bad, bad[0]
            batch_id = self._start_batch()
            num_resumed = num_acknowledged = 0
            for number in range(num_cuts):
                share = (number + chance.random()) / num_cuts
                self._wait_for_lines(batch_id, int(share * self._num_lines))
                writes = AcknowledgedWrites(f"{self._url}/v1")
                writes.wait_for(MIN_ACKNOWLEDGED)
                losses = chance if number % 2 else None
                answers, load = asyncio.run(self._cut_under_streams(servers, disk, losses))
                writes.stop()
                writes.check()
                num_acknowledged += writes.num_acknowledged
                different = [n for n, answer in enumerate(answers) if answer != expected[n]]
                assert not different, f"streams {different}: {answers[different[0]]}"
                num_resumed += load.num_resumed
            self._check_batch(batch_id)
        return (
            f"{num_cuts} power cuts: {self._num_lines} lines and {num_cuts} times"
            f" {self._num_streams} streams have one answer each, {num_resumed} connections were"
            f" resumed, {num_acknowledged} writes were acknowledged; 0 lost, doubled, different"
        )

    def _streams(self) -> ResumedStreams:
        return ResumedStreams(self._url, TIMEOUT_S, self._num_streams)

    async def _cut_under_streams(
        self, servers: Restarts, disk: DurableDisk, losses: random.Random | None
    ) -> tuple[list[Answer | Exception], ResumedStreams]:
        load = self._streams()
        streams = asyncio.create_task(load.run())
        await load.started.wait()
        await asyncio.to_thread(servers.disturb_all, signal.SIGKILL, lambda: disk.cut(losses))
        return await streams, load

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
