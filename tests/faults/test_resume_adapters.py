"""All processes die while adapters answer; the next run goes on with the versions of before."""

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.client.server import free_port
from quadriga import AsyncClient, Client, SamplingParams
from quadriga.errors import InvalidRequest
from tests.server import Server, cut_the_power, running_server
from tests.tiny_adapters import make_adapter
from tests.waiting import wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49]]
REQUESTS = [(name, number) for name in ("", "first", "second") for number in range(len(PROMPTS))]


@dataclass
class Answer:
    """What the client of a request got.

    Attributes:
        adapter: id of the adapter that has answered; "" before the end.
    """

    token_ids: list[int] = field(default_factory=list)
    adapter: str = ""
    error: Exception | None = None


class Streams(threading.Thread):
    """Streams of all requests by one client, and later another one of each adapter.

    Attributes:
        answers: by the adapter's name and the number of the prompt; -1 for the later ones.
        go_on: set to send the later ones.
        have_begun: set when each of the first ones has a token.

    Args:
        endpoint: of the server.
        on_begun: called before `have_begun` is set.
    """

    def __init__(self, endpoint: str, on_begun: Callable[[], None] = lambda: None) -> None:
        super().__init__(daemon=True)
        self.answers = {request: Answer() for request in [*REQUESTS, *self.later]}
        self.go_on, self.have_begun = threading.Event(), threading.Event()
        self._endpoint, self._on_begun = endpoint, on_begun
        self.start()

    @property
    def later(self) -> list[tuple[str, int]]:
        return [("first", -1), ("second", -1)]

    def run(self) -> None:
        async def stream(client: AsyncClient, name: str, number: int) -> None:
            answer = self.answers[name, number]
            try:
                async for chunk in client.stream(PROMPTS[number], GREEDY, adapter=name):
                    answer.token_ids += chunk.token_ids
                    self._note_begin()
                    if chunk.completion is not None:
                        answer.adapter = chunk.completion.adapter
            except InvalidRequest as error:
                answer.error = error

        async def run_all() -> None:
            async with AsyncClient(self._endpoint, reconnect_timeout=120) as client:
                first = [asyncio.create_task(stream(client, *each)) for each in REQUESTS]
                await asyncio.to_thread(self.go_on.wait)
                await asyncio.gather(*first, *(stream(client, *each) for each in self.later))

        asyncio.run(run_all())

    def _note_begin(self) -> None:
        has_begun = all(self.answers[request].token_ids for request in REQUESTS)
        if has_begun and not self.have_begun.is_set():
            self._on_begun()
            self.have_begun.set()

    def results(self) -> dict[tuple[str, int], Answer]:
        self.go_on.set()
        self.join(90)
        assert not self.is_alive()
        return self.answers


def begin(server: Server) -> Streams:
    """Return streams with their first tokens, and later ones that are accepted, without tokens."""
    workers = [pid for name, pid in server.pids.items() if name.startswith("worker_proc")]

    def stop_workers() -> None:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)

    streams = Streams(server.endpoint, stop_workers)
    assert streams.have_begun.wait(30)
    streams.go_on.set()
    with Client(server.endpoint) as client:

        def are_accepted() -> bool:
            info = client.info(30)
            return bool(info["running"] + info["waiting"] == len(streams.answers))

        wait_until(are_accepted, 30, lambda: str(client.info(30)))
    return streams


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("change", "num_replicas"), [("replaced", 1), ("unnamed", 2), ("lost", 1)])
def test_requests_keep_the_versions_of_their_adapters_where_all_processes_die(
    change: str, num_replicas: int, llama_dir: Path, tmp_path: Path
) -> None:
    """Their files change meanwhile, or their names are gone. Without copies they end by errors."""
    paths = {name: tmp_path / name for name in ("first", "second")}
    for seed, (name, path) in enumerate(paths.items()):
        make_adapter(llama_dir, path, seed=seed)
        make_adapter(llama_dir, tmp_path / f"other-{name}", seed=seed + 10)
    journal, endpoint = tmp_path / "journal", f"tcp://127.0.0.1:{free_port()}"
    options = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
               "--max-total-tokens", "16384", "--journal", str(journal), "--enable-lora",
               "--dp", str(num_replicas)]  # fmt: skip
    names = ["--lora-modules", ",".join(f"{name}={path}" for name, path in paths.items())]
    with running_server(tmp_path / "log-1", *options, *names, endpoint=endpoint) as server:
        expected = Streams(endpoint).results()
        disturbed = begin(server)
        cut_the_power(server)
    for name, path in paths.items():
        shutil.rmtree(path)
        shutil.copytree(tmp_path / f"other-{name}", path)
    if change == "lost":
        shutil.rmtree(journal / "adapters")
    named = [] if change == "unnamed" else names
    with running_server(
        tmp_path / "log-2", *options, *named, "--resume", endpoint=endpoint
    ) as server:
        answers = disturbed.results()
        if named:
            with Client(endpoint) as client:
                new = client.generate(PROMPTS[0], GREEDY, adapter="first")
                assert new.token_ids != expected["first", 0].token_ids
                assert new.adapter != expected["first", 0].adapter
    for request, answer in answers.items():
        whole = expected[request]
        if change == "lost" and request[0]:
            assert whole.token_ids[: len(answer.token_ids)] == answer.token_ids
            assert str(answer.error).endswith(
                f"adapter {request[0]!r}: its files {paths[request[0]]} have another content by now"
                " than when the request was sent: send the request again"
            )
        else:
            assert answer == whole, request
