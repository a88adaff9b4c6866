"""An upgrade: data of the version before is taken over, and no request that is open is dropped."""

import asyncio
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bench.client.server import free_port
from quadriga.client import AsyncClient
from quadriga.sampling.params import SamplingParams
from quadriga.server.processes.control_channel import EXIT_FORCED, EXIT_OK
from tests.faults.resumed_streams import ResumedStreams
from tests.old_data import MODEL, NUM_LINES, STREAM, Gateway, flags
from tests.server import ROOT, kill_tree, launch, running_server, wait_until, wait_until_ready

BEFORE = ROOT / "tests" / "fixtures" / "version_0_1_0"
# The data is old: what would expire meanwhile is kept.
KEPT = ["--resume", "--max-stored-age", "1e9"]


def text_of(events: bytes) -> str:
    lines = [line[6:] for line in events.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["text"] for choice in choices)


def give_batches_time(journal: Path) -> None:
    """Give the open batches another day."""
    for path in (journal / "data" / "batches").glob("*.json"):
        content = json.loads(path.read_text())
        (content.get("batch") or content)["expires_at"] = int(time.time()) + 86400  # noqa: TID251
        path.write_text(json.dumps(content))


@pytest.mark.timeout(240)
def test_journal_and_data_of_the_version_before_are_taken_over(tmp_path: Path) -> None:
    ids: dict[str, Any] = json.loads((BEFORE / "ids.json").read_text())
    journal, port = tmp_path / "journal", free_port()
    shutil.copytree(BEFORE / "journal", journal)
    give_batches_time(journal)
    gateway = Gateway(port)
    with running_server(tmp_path / "log", *flags(BEFORE / "model", journal, port), *KEPT) as server:
        # What had ended.
        assert gateway.read(f"/v1/files/{ids['file']}/content").decode() == ids["file_content"]
        batch = gateway.ask(f"/v1/batches/{ids['batch']}")
        assert batch["status"] == "completed"
        output = gateway.read(f"/v1/files/{batch['output_file_id']}/content").decode()
        assert len(output.splitlines()) == NUM_LINES
        stored = gateway.ask(f"/v1/responses/{ids['response']}")
        assert stored["output"] == ids["response_output"]
        assert gateway.ask(f"/v1/conversations/{ids['conversation']}")["metadata"] == {
            "topic": "foxes"
        }
        items = gateway.ask(f"/v1/conversations/{ids['conversation']}/items")["data"]
        assert len(items) == 2
        # What goes on: a stream, from any event, with the same text as without the death.
        whole = gateway.read("/v1/streams/fox-1", headers={"Last-Event-ID": "0"})
        assert whole.startswith(ids["stream_begin"].encode())
        assert whole.endswith(b"data: [DONE]\n\n")
        undisturbed = gateway.ask("/v1/completions", STREAM | {"stream": False, "resumable": False})
        assert text_of(whole) == undisturbed["choices"][0]["text"]
        background = f"/v1/responses/{ids['background']}"
        wait_until(lambda: gateway.ask(background)["status"] == "incomplete", 60)
        assert gateway.ask(background)["usage"]["output_tokens"] == 150
        wait_until(
            lambda: gateway.ask(f"/v1/batches/{ids['open_batch']}")["status"] == "completed", 60
        )
        # And what is new refers to what is old.
        body = {"input": "And?", "previous_response_id": ids["response"], "max_output_tokens": 4}
        assert gateway.ask("/v1/responses", body)["previous_response_id"] == ids["response"]
        assert server.pid_of("scheduler_proc")


# --- with streams open ----------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stop", ["drained", "short timeout", "second signal"])
def test_a_new_version_takes_over_with_streams_open_and_none_is_dropped(
    llama_dir: Path, tmp_path: Path, stop: str
) -> None:
    """A stop lets open requests end; what takes longer goes on at the next server.

    A resumable stream does so after --shutdown-timeout, a request by ZeroMQ after a second signal.
    """
    at_once = stop == "second signal"
    by_zmq = [] if stop == "short timeout" else [[5 + n] for n in range(8)]
    port, endpoint = free_port(), f"ipc://{tmp_path}/zmq"
    start = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
             "--max-total-tokens", "16384", "--port", str(port), "--served-model-name", MODEL,
             "--journal", str(tmp_path / "journal"), "--resume"]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    params = SamplingParams(max_new_tokens=100, temperature=0.0, ignore_eos=True)

    async def undisturbed() -> tuple[list[object], list[list[int]]]:
        streams = ResumedStreams(url, 60.0, 20)
        async with AsyncClient(endpoint) as client:
            texts = await asyncio.gather(*(client.generate(prompt, params) for prompt in by_zmq))
        return list(await streams.run()), [list(text.token_ids) for text in texts]

    with running_server(tmp_path / "log", *start, endpoint=endpoint):
        expected = asyncio.run(undisturbed())

    slow = ["--shutdown-timeout", "0.5", "--max-batch-size", "1"]
    timeout = slow if stop == "short timeout" else []
    processes = [launch(endpoint, *start, *timeout, log=tmp_path / "old")]
    try:
        wait_until_ready(processes[0], tmp_path / "old")

        def replace() -> None:
            processes[0].send_signal(signal.SIGTERM)
            if at_once:
                wait_until(lambda: "stopping" in (tmp_path / "old").read_text(), 10)
                processes[0].send_signal(signal.SIGTERM)
            assert processes[0].wait(60) == (EXIT_FORCED if at_once else EXIT_OK)
            processes.append(launch(endpoint, *start, log=tmp_path / "new"))
            wait_until_ready(processes[1], tmp_path / "new")

        async def upgraded() -> tuple[list[object], list[list[int]]]:
            streams = ResumedStreams(url, 120.0, 20)
            async with AsyncClient(endpoint, reconnect_timeout=120.0) as client:
                asked = [asyncio.create_task(client.generate(prompt, params)) for prompt in by_zmq]
                running = asyncio.create_task(streams.run())
                await streams.started.wait()
                await asyncio.to_thread(replace)
                answers: list[object] = list(await running)
                assert stop == "drained" or streams.num_resumed, "some were open"
                return answers, [list((await each).token_ids) for each in asked]

        found = asyncio.run(upgraded())
        assert not [answer for answer in found[0] if isinstance(answer, Exception)]
        assert found == expected
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            kill_tree(process)
