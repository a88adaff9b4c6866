"""A part of the kills at swaps, the whole of which is python -m tests.faults.swap_kills; and ends.

What else can happen to a model while it is not loaded: a drain, a signal to reload, a file that is
gone, and a frontend that dies.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quadriga.client import AsyncClient, SamplingParams
from quadriga.errors import RequestFailed
from tests.faults.swap_kills import main
from tests.two_models import GREEDY, PROMPT, TwoModels, two_models
from tests.waiting import wait_until, wait_until_async

TURNS = ("--model-memory", "0.24", "--model-turn", "1", "--mem-fraction-static", "0.001",
         "--max-batch-size", "2", "--shutdown-timeout", "60")  # fmt: skip
LONG = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
COUNT = 30


@contextmanager
def taking_turns(llama: Path, gpt2: Path, *flags: str) -> Iterator[TwoModels]:
    with two_models(llama, gpt2, *TURNS, *flags) as served:
        yield served


async def texts_of(client: AsyncClient, count: int) -> list[str]:
    asked = [client.generate([5, 6, number], LONG) for number in range(count)]
    return [one.text for one in await asyncio.gather(*asked)]


@pytest.mark.timeout(300)
def test_kills_while_models_take_turns_cost_nothing() -> None:
    flags = ["--moments", "pausing", "--signals", "SIGKILL", "--seed", "1"]
    assert main([*flags, "--processes", "worker_proc", "scheduler_proc"]) == 0


@pytest.mark.parametrize("kills_frontend", [False, True])
def test_a_drain_finishes_what_waits_for_a_model_that_is_not_loaded(
    llama_dir: Path, gpt2_dir: Path, kills_frontend: bool
) -> None:
    async def run(served: TwoModels) -> None:
        server = served.server
        async with (
            AsyncClient(server.endpoint, model="first") as first,
            AsyncClient(server.endpoint, model="second") as second,
        ):
            clients = (first, second)
            expected = [await texts_of(client, COUNT) for client in clients]
            asked = [asyncio.create_task(texts_of(client, COUNT)) for client in clients]
            log = server.log
            seen = log.read_text().count("is suspended with")
            await wait_until_async(
                lambda: log.read_text().count("is suspended with") > seen, 30, log.read_text
            )
            if kills_frontend:
                for name in ("first", "second"):
                    os.kill(server.pid_of(f"tokenizer_proc@{name}"), signal.SIGKILL)
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.gather(*asked) == expected
        assert await asyncio.to_thread(server.process.wait, 60) == 0

    with taking_turns(llama_dir, gpt2_dir) as served:
        asyncio.run(asyncio.wait_for(run(served), 90))


def test_a_model_whose_files_are_gone_fails_alone_and_a_reload_leaves_unloaded_ones_alone(
    llama_dir: Path, gpt2_dir: Path, tmp_path: Path
) -> None:
    files = tmp_path / "gpt2"
    shutil.copytree(gpt2_dir, files)
    with taking_turns(llama_dir, files, "--sleep-idle-seconds", "1000") as served:
        server = served.server
        with served.client("first") as first, served.client("second") as second:
            expected = first.generate(PROMPT, GREEDY).text
            assert served.states() == {"first": "loaded", "second": "unloaded"}
            pid = server.pid_of("worker_proc@first")
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: server.pid_of("worker_proc@first") not in (0, pid), 20)
            assert first.generate(PROMPT, GREEDY).text == expected
            assert server.pid_of("worker_proc@second") == 0
            (files / "model.safetensors").unlink()
            with pytest.raises(RequestFailed, match="model second could not be loaded"):
                second.generate(PROMPT, GREEDY)
            assert served.states()["second"] == "failed"
            assert first.generate(PROMPT, GREEDY).text == expected
