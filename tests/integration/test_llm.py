"""LLM: a program's own server, which starts with it and ends with it, however it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from quadriga import LLM, AsyncClient, ModelError, RequestAborted, SamplingParams, ServerFailed
from quadriga.llm import ServerFlags
from tests.server import ROOT, is_alive, wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
FLAGS: ServerFlags = {"dtype": "float32", "worker_threads": 1, "max_total_tokens": 4096}
CHAT = [{"role": "user", "content": "hello"}]

PROGRAM = """
import json, os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork, from Python 3.12 on
from quadriga import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", worker_threads=1, max_total_tokens=4096)
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    time.sleep(600)
    os._exit(0)
pids = [llm._server.pid, *llm.client.info()["pids"].values()]
print(json.dumps({"endpoint": llm.endpoint, "pids": pids, "fork": child}), flush=True)
for chunk in llm.stream("a", SamplingParams(max_tokens=100, ignore_eos=True)):
    print(len(chunk.token_ids), flush=True)
if sys.argv[2:] == ["wait"]:
    llm.generate(["a"] * 400, SamplingParams(max_tokens=200, ignore_eos=True))
"""


class Program:
    """A program in a process of its own, whose LLM is ready; it streams 100 tokens."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        # A server that looked for its modules in the working directory would import this one.
        (directory / "launcher.py").write_text("raise SystemExit('the wrong launcher')")
        script = directory / "program.py"
        script.write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.report = json.loads(line)
        self.run_dir = Path(self.report["endpoint"].removeprefix("ipc://")).parent
        assert self.process.stdout.readline().strip()  # the first token

    def leftovers(self) -> list[str]:
        alive = [str(pid) for pid in self.report["pids"] if is_alive(pid)]
        return alive + ([str(self.run_dir)] if self.run_dir.exists() else [])

    def wait_for_nothing_left(self) -> None:
        wait_until(lambda: not self.leftovers(), 10, lambda: f"left: {self.leftovers()}")

    def end(self) -> None:
        """Kill what is left: the program, and its fork."""
        self.process.kill()
        if is_alive(self.report["fork"]):
            os.kill(self.report["fork"], signal.SIGKILL)
        self.process.communicate()


def processes(llm: LLM) -> list[psutil.Process]:
    launcher = psutil.Process(llm._server.pid)
    return [launcher, *launcher.children(recursive=True)]


def alive(started: list[psutil.Process]) -> list[int]:
    return [process.pid for process in started if is_alive(process.pid)]


@pytest.fixture(scope="module")
def llm(llama_dir: Path) -> Iterator[LLM]:
    with LLM(llama_dir, **FLAGS) as llm:
        yield llm
        started = processes(llm)
    assert not Path(llm.endpoint.removeprefix("ipc://")).parent.exists()
    wait_until(lambda: not alive(started), 5)
    with pytest.raises(RequestAborted):
        llm.generate("a")


def test_prompts_chats_and_streams(llm: LLM) -> None:
    one = llm.generate("The quick", GREEDY)
    assert len(one.token_ids) == 6
    assert one.timings.ttft is not None and one.timings.tpot is not None
    assert 0 < one.timings.ttft <= one.timings.total
    two = llm.generate(["The quick", "Another"], [GREEDY, SamplingParams(max_tokens=1)])
    assert [len(done.token_ids) for done in two] == [6, 1]
    assert two[0].text == one.text
    assert "".join(chunk.text for chunk in llm.stream("The quick", GREEDY)) == one.text
    assert llm.chat(CHAT, GREEDY).text == llm.chat([CHAT], GREEDY)[0].text


def test_it_works_while_an_event_loop_runs_and_beside_an_async_client(llm: LLM) -> None:
    async def both() -> tuple[str, str]:
        async with AsyncClient(llm.endpoint) as client:
            return llm.generate("a", GREEDY).text, (await client.generate("a", GREEDY)).text

    one, other = asyncio.run(both())
    assert one == other


def test_threads_share_it(llm: LLM) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: llm.generate("a", GREEDY).text, range(16)))
    assert len(set(texts)) == 1


def test_it_outlives_the_thread_that_made_it_and_others_run_beside_it(
    llm: LLM, llama_dir: Path
) -> None:
    made: list[LLM] = []
    threads = [threading.Thread(target=lambda: made.append(LLM(llama_dir, **FLAGS))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({llm.endpoint, *(other.endpoint for other in made)}) == 3
        expected = llm.generate("a", GREEDY).token_ids
        assert [other.generate("a", GREEDY).token_ids for other in made] == [expected] * 2
    finally:
        for other in made:
            other.close()
            other.close()


@pytest.mark.parametrize("name", ["tokenizer_proc", "worker_proc"])
def test_a_stream_goes_on_when_a_process_of_the_server_is_killed(llm: LLM, name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = llm.generate("a", params).text
    text = ""
    for chunk in llm.stream("a", params):
        if not text:
            os.kill(llm.client.info()["pids"][name], signal.SIGKILL)
        text += chunk.text
    assert text == expected


@pytest.mark.timeout(60)
def test_the_death_of_the_launcher_ends_every_call(llama_dir: Path) -> None:
    with LLM(llama_dir, **FLAGS) as llm:
        started = processes(llm)
        calls = llm.stream("a", SamplingParams(max_tokens=100, ignore_eos=True))
        next(calls)
        os.kill(llm._server.pid, signal.SIGKILL)
        with pytest.raises(ServerFailed, match=r"make another LLM|launcher was killed"):
            llm.generate(["a"] * 300, SamplingParams(max_tokens=100, ignore_eos=True))
        with pytest.raises(ServerFailed, match=r"killed by SIGKILL|launcher was killed"):
            llm.generate("a")
        wait_until(lambda: not alive(started), 5)


def test_an_llm_that_is_no_longer_used_is_stopped(llama_dir: Path) -> None:
    llm: Any = LLM(llama_dir, **FLAGS)
    started = processes(llm)
    assert len(alive(started)) >= 5
    del llm
    wait_until(lambda: not alive(started), 20)


def test_an_error_of_a_start_is_raised_with_the_servers_sentence(
    llama_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        LLM("./absent")
    config = json.loads((llama_dir / "config.json").read_text())
    for name in llama_dir.iterdir():
        (tmp_path / name.name).symlink_to(name)
    (tmp_path / "config.json").unlink()
    config |= {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="T5ForConditionalGeneration"):
        LLM(tmp_path, **FLAGS)


def test_nothing_is_left_after_kill_9_of_the_program(llama_dir: Path, tmp_path: Path) -> None:
    program = Program(tmp_path, str(llama_dir), "wait")
    try:
        program.process.kill()
        program.wait_for_nothing_left()
        assert is_alive(program.report["fork"]), "a fork keeps the server of its parent"
    finally:
        program.end()


def test_ctrl_c_ends_the_program_and_its_server(llama_dir: Path, tmp_path: Path) -> None:
    program = Program(tmp_path, str(llama_dir), "wait")
    try:
        program.process.send_signal(signal.SIGINT)
        _, errors = program.process.communicate(timeout=20)
        assert program.process.returncode == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
        program.wait_for_nothing_left()
    finally:
        program.end()


def test_a_program_that_ends_without_close_says_nothing(llama_dir: Path, tmp_path: Path) -> None:
    program = Program(tmp_path, str(llama_dir))
    try:
        _, errors = program.process.communicate(timeout=30)
        assert (program.process.returncode, errors) == (0, "")
        assert not program.leftovers()
    finally:
        program.end()


def test_a_program_that_is_killed_while_it_starts_leaves_nothing(
    llama_dir: Path, tmp_path: Path
) -> None:
    code = f"from quadriga import LLM; LLM({str(llama_dir)!r}, dtype='float32')"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_until(lambda: any(tmp_path.iterdir()), 30)
        started = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    assert started
    wait_until(lambda: not any(tmp_path.iterdir()) and not alive(started), 20)


@pytest.mark.timeout(240)
def test_the_notebook_runs_from_its_first_to_its_last_cell(tmp_path: Path) -> None:
    """Its kernel runs an event loop, and has another working directory than the checkout."""
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "llm.ipynb", as_version=4)
    kernel = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        kernel.execute()
    printed = json.dumps(notebook.cells)
    assert "Paris" in printed
    assert "LLM('smollm2-135m', pid" in printed


@pytest.mark.parametrize("example", ["llm.py", "chat.py"])
def test_the_examples_run(example: str, llama_dir: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), str(llama_dir)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input="hello\n\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout
