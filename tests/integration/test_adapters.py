"""Adapters of one model in one server: their answers, their files, and deaths of processes."""

import asyncio
import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from bench.client.server import free_port
from quadriga import LLM, AsyncClient, Client, LoRARequest, SamplingParams
from quadriga.errors import InvalidRequest
from quadriga.server.cli.main import main
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.adapters.store import AdapterStore
from scheduler_proc.journal import replay
from tests.references import greedy_of
from tests.server import Server, launch, running_server
from tests.tiny_adapters import make_adapter
from tests.waiting import wait_until

PROMPTS = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49]]
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NAMES = ("a0", "a1", "a2", "a3", "a4")
MAX_LORAS, MAX_IN_MEMORY = 2, 4


@dataclass
class Adapters:
    """A server of the tiny Llama with more adapters than places.

    Attributes:
        answers: what transformers and PEFT generate after each of PROMPTS, by the adapter's name;
            "": the model itself.
    """

    server: Server
    url: str
    directory: Path
    answers: dict[str, list[list[int]]]

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Return the status and the answer, as JSON if it is that."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text, status = answer.read().decode(), answer.status
        except urllib.error.HTTPError as error:
            text, status = error.read().decode(), error.code
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return json.load(answer)


def peft_model(model_dir: Path, adapter_dir: Path) -> Any:
    """Return PEFT's model with an adapter beside its weights, in float32; not merged."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter_dir)).eval()


@pytest.fixture(scope="module")
def adapters(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    directory = tmp_path_factory.mktemp("adapters")
    answers = {"": greedy_of(llama_dir, PROMPTS, NUM_TOKENS)}
    for number, name in enumerate(NAMES):
        path = make_adapter(llama_dir, directory / name, seed=number, rank=2 + 3 * number)
        answers[name] = greedy_of(peft_model(llama_dir, path), PROMPTS, NUM_TOKENS)
    assert len({str(each) for each in answers.values()}) == len(answers)
    port = free_port()
    flags = ["--model", str(llama_dir), "--served-model-name", "base", "--dtype", "float32",
             "--worker-threads", "1", "--max-total-tokens", "4096", "--port", str(port),
             "--lora-modules", f"a0={directory / 'a0'}", "--lora-dir", str(directory),
             "--enable-lora", "--max-loras", str(MAX_LORAS),
             "--max-cpu-loras", str(MAX_IN_MEMORY)]  # fmt: skip
    with running_server(tmp_path_factory.mktemp("log") / "log", *flags) as server:
        yield Adapters(server, f"http://127.0.0.1:{port}", directory, answers)


async def all_answers(client: AsyncClient, repeats: int = 1) -> list[tuple[str, int, list[int]]]:
    """Return the answers of all adapters and of the model to all prompts, sent at one time."""
    asked = [(name, i) for _ in range(repeats) for i in range(2) for name in ("", *NAMES)]
    completions = await asyncio.gather(
        *(client.generate(PROMPTS[i], GREEDY, adapter=name) for name, i in asked)
    )
    return [(*each, c.token_ids) for each, c in zip(asked, completions, strict=True)]


def test_a_fork_has_the_adapter_of_its_answer(adapters: Adapters) -> None:
    with Client(adapters.server.endpoint) as client:
        for name in NAMES[:3]:
            answer = client.generate(PROMPTS[1], GREEDY, adapter=name)
            for at in (0, 5, NUM_TOKENS - 1):
                assert client.fork(answer, at, GREEDY).token_ids == adapters.answers[name][1]
            other = client.fork(answer, 5, GREEDY, adapter="")
            assert other.token_ids[5:] != adapters.answers[name][1][5:]


def test_all_adapters_and_the_model_answer_together_as_alone(adapters: Adapters) -> None:
    async def run() -> None:
        async with AsyncClient(adapters.server.endpoint) as client:
            for name, i, token_ids in await all_answers(client, repeats=3):
                assert token_ids == adapters.answers[name][i], (name, i)
            info = (await client.info())["adapters"]
        assert info["max"] == MAX_LORAS and not info["running"] and not info["waiting"]
        assert info["loads"] >= len(NAMES) and len(info["in_memory"]) == MAX_IN_MEMORY

    asyncio.run(run())


def test_an_adapter_that_was_used_before_answers_without_its_files(adapters: Adapters) -> None:
    """More adapters than places take turns; their copies are not there to be read."""
    with Client(adapters.server.endpoint) as client:
        names, before = NAMES[:MAX_IN_MEMORY], client.info()
        for name in names:
            client.generate(PROMPTS[0], GREEDY, adapter=name)
        between = client.info()["adapters"]
        assert sorted(between["in_memory"]) == sorted(names)
        copies, away = Path(before["adapter_copies"]), adapters.directory.parent / "away"
        ids = [before["adapter_ids"][name] for name in names]
        away.mkdir()
        for adapter_id in ids:
            (copies / adapter_id).rename(away / adapter_id)
        try:
            for name in names:
                answer = client.generate(PROMPTS[1], GREEDY, adapter=name)
                assert answer.token_ids == adapters.answers[name][1]
        finally:
            for adapter_id in ids:
                (away / adapter_id).rename(copies / adapter_id)
        after = client.info()["adapters"]
    assert after["loads"] - between["loads"] >= MAX_IN_MEMORY - MAX_LORAS
    assert after["memory_loads"] - between["memory_loads"] == after["loads"] - between["loads"]


def test_requests_name_adapters_as_models_and_the_list_has_their_parent(adapters: Adapters) -> None:
    for fields in ({"model": "a1"}, {"model": "base", "lora_path": "a1"}):
        status, answer = adapters.post(
            "/v1/completions", prompt=PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0,
            ignore_eos=True, return_token_ids=True, **fields,
        )  # fmt: skip
        assert (status, answer["model"]) == (200, "a1")
        assert answer["choices"][0]["token_ids"] == adapters.answers["a1"][0]
    listed = {card["id"]: card for card in adapters.get("/v1/models")["data"]}
    assert listed["base"]["parent"] is None
    assert listed["a0"]["parent"] == "base"
    assert listed["a0"]["root"] == str(adapters.directory / "a0")
    number = next(one["id"] for one in adapters.get("/lora-adapters") if one["name"] == "a0")
    status, answer = adapters.post(
        "/v1/completions", prompt=PROMPTS[0], max_tokens=1, lora=[{"id": number, "scale": 1}]
    )
    assert (status, answer["model"]) == (200, "a0")


def test_a_client_is_for_an_adapter_as_for_a_model(adapters: Adapters) -> None:
    with Client(adapters.server.endpoint, model="a2") as client:
        assert client.generate(PROMPTS[1], GREEDY).token_ids == adapters.answers["a2"][1]


@pytest.mark.parametrize("program", ["worker_proc", "scheduler_proc", "tokenizer_proc"])
def test_no_answer_is_lost_or_another_one_where_a_process_dies(
    adapters: Adapters, program: str
) -> None:
    async def run() -> None:
        async with AsyncClient(adapters.server.endpoint) as client:
            task = asyncio.create_task(all_answers(client, repeats=4))
            await asyncio.sleep(0.1)
            assert not task.done()
            os.kill(adapters.server.pid_of(program), signal.SIGKILL)
            for name, i, token_ids in await task:
                assert token_ids == adapters.answers[name][i], (name, i)

    asyncio.run(run())


def test_a_stream_goes_on_with_the_version_that_it_has_begun_with(
    adapters: Adapters, llama_dir: Path
) -> None:
    """Its files are overwritten, the name is another adapter's, and the worker dies."""
    path = adapters.directory.parent / "versions"
    shutil.copytree(adapters.directory / "a1", path)
    assert adapters.post("/v1/load_lora_adapter", lora_name="v", lora_path=str(path))[0] == 200
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = greedy_of(peft_model(llama_dir, path), PROMPTS[:1], 200)[0]

    async def run() -> None:
        async with AsyncClient(adapters.server.endpoint) as client:
            tokens: list[int] = []
            async for chunk in client.stream(PROMPTS[0], long, adapter="v"):
                if not tokens:
                    shutil.copytree(adapters.directory / "a2", path, dirs_exist_ok=True)
                    again = {"lora_name": "v", "lora_path": str(path)}
                    status, _ = await asyncio.to_thread(
                        adapters.post, "/v1/load_lora_adapter", load_inplace=True, **again
                    )
                    assert status == 200
                    new = client.generate(PROMPTS[0], GREEDY, adapter="v")
                    assert (await new).token_ids == adapters.answers["a2"][0]
                    os.kill(adapters.server.pid_of("worker_proc"), signal.SIGKILL)
                tokens += chunk.token_ids
            assert tokens == expected

    asyncio.run(run())
    assert adapters.post("/v1/unload_lora_adapter", lora_name="v")[0] == 200
    assert adapters.post("/v1/completions", model="v", prompt="x")[0] == 404


@pytest.mark.parametrize("change", ["replaced", "unloaded"])
def test_a_stream_keeps_its_version_where_the_frontend_dies(
    adapters: Adapters, llama_dir: Path, change: str
) -> None:
    """The name changes in mid-stream, the frontend dies, and then the worker."""
    name, path = f"of-{change}", adapters.directory / "a3"
    load = {"lora_name": name, "lora_path": str(path)}
    assert adapters.post("/v1/load_lora_adapter", **load)[0] == 200
    long = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)

    async def run() -> None:
        async with AsyncClient(adapters.server.endpoint) as client:
            expected = (await client.generate(PROMPTS[0], long, adapter=name)).token_ids
            info = await client.info()
            before = info["adapter_ids"][name]
            store = AdapterStore(
                Path(info["adapter_directory"]), Path(info["adapter_copies"]),
                ModelArgs(enable_lora=True), MAX_LORAS,
            )  # fmt: skip
            tokens: list[int] = []
            completion = None
            async for chunk in client.stream(PROMPTS[0], long, adapter=name):
                if not tokens:
                    worker = adapters.server.pid_of("worker_proc")
                    os.kill(worker, signal.SIGSTOP)
                    if change == "replaced":
                        store.load(name, str(adapters.directory / "a4"), replace=True)
                    else:
                        store.unload(name)
                    os.kill(adapters.server.pid_of("tokenizer_proc"), signal.SIGKILL)
                    assert (await client.info(60))["adapter_ids"].get(name) != before
                    os.kill(worker, signal.SIGKILL)
                tokens += chunk.token_ids
                completion = chunk.completion or completion
            assert completion is not None and completion.adapter == before
            assert tokens == expected and tokens[:NUM_TOKENS] == adapters.answers["a3"][0]

    asyncio.run(run())


def test_a_pinned_adapter_keeps_its_place_also_where_processes_die(adapters: Adapters) -> None:
    body = {"lora_name": "pinned", "lora_path": str(adapters.directory / "a1")}
    status, answer = adapters.post("/load_lora_adapter", **body, pinned=True)
    assert status == 200 and answer["loaded_adapters"]["pinned"] == body["lora_path"]
    listed = {card["id"]: card for card in adapters.get("/v1/models")["data"]}
    assert listed["pinned"]["pinned"] is True and listed["a1"]["pinned"] is False
    assert "pinned" not in listed["base"]
    assert [o["name"] for o in adapters.get("/lora-adapters") if o["pinned"]] == ["pinned"]
    second = {"lora_name": "more", "lora_path": str(adapters.directory / "a2"), "pinned": True}
    status, answer = adapters.post("/v1/load_lora_adapter", **second)
    assert status == 400 and answer["error"]["param"] == "pinned", answer
    assert "--max-loras is 2" in answer["error"]["message"]

    def is_in_its_place() -> bool:
        info = client.info(60)["adapters"]
        return "pinned" in info["loaded"] and info["pinned"] == ["pinned"]

    with Client(adapters.server.endpoint) as client:
        for name in ("a0", "a3", "a4"):
            assert client.generate(PROMPTS[0], GREEDY, adapter=name).token_ids
            assert is_in_its_place()
        for program in ("worker_proc", "scheduler_proc", "tokenizer_proc"):
            os.kill(adapters.server.pid_of(program), signal.SIGKILL)
            wait_until(is_in_its_place, 60)
        answer = client.generate(PROMPTS[0], GREEDY, adapter="pinned")
        assert answer.token_ids == adapters.answers["a1"][0]
        assert adapters.post("/v1/unload_lora_adapter", lora_name="pinned")[0] == 200
        client.generate(PROMPTS[0], GREEDY, adapter="a0")
        assert client.info()["adapters"]["pinned"] == []
    assert adapters.post("/v1/load_lora_adapter", **second)[0] == 200
    assert adapters.post("/v1/unload_lora_adapter", lora_name="more")[0] == 200


def test_what_cannot_be_loaded_is_an_error_with_its_reason(adapters: Adapters) -> None:
    broken = adapters.directory.parent / "broken"
    shutil.copytree(adapters.directory / "a1", broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    load = "/v1/load_lora_adapter"
    for body, status, part in (
        ({"lora_name": "x", "lora_path": "/nowhere"}, 400, "/nowhere"),
        ({"lora_name": "x", "lora_path": str(broken)}, 400, "cut short"),
        ({"lora_name": "base", "lora_path": str(adapters.directory / "a1")}, 400, "model's name"),
        ({"lora_name": "a b", "lora_path": str(adapters.directory / "a1")}, 400, "blanks"),
        ({"lora_name": "a0", "lora_path": str(adapters.directory / "a1")}, 400, "load_inplace"),
    ):
        found, answer = adapters.post(load, **body)
        assert found == status and part in answer["error"]["message"], answer
    status, answer = adapters.post("/v1/unload_lora_adapter", lora_name="x")
    assert status == 404 and "'x'" in answer["error"]["message"]
    status, answer = adapters.post("/v1/completions", model="a0x", prompt="x")
    assert status == 404 and "'a0'" in answer["error"]["message"]
    with (
        Client(adapters.server.endpoint) as client,
        pytest.raises(InvalidRequest, match="there is no adapter"),
    ):
        client.generate("x", adapter="../a1")


def test_an_adapter_of_another_model_is_refused_where_it_is_loaded(
    adapters: Adapters, gpt2_dir: Path
) -> None:
    path = make_adapter(gpt2_dir, adapters.directory / "of-gpt2", seed=1)
    status, answer = adapters.post("/v1/completions", model="of-gpt2", prompt="x")
    assert status == 400 and "adapter 'of-gpt2': " in answer["error"]["message"], answer
    before = adapters.get("/lora-adapters")
    for name, body in (("other", {}), ("a0", {"load_inplace": True})):
        status, answer = adapters.post(
            "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **body
        )
        message = answer["error"]["message"]
        assert status == 400 and f"{name!r}: the adapter {path}: " in message, answer
    assert adapters.get("/lora-adapters") == before
    status, answer = adapters.post(
        "/v1/completions", model="a0", prompt=PROMPTS[0], max_tokens=NUM_TOKENS, temperature=0,
        ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    assert answer["choices"][0]["token_ids"] == adapters.answers["a0"][0]


def test_an_llm_loads_the_adapter_of_a_request(adapters: Adapters, llama_dir: Path) -> None:
    path = str(adapters.directory / "a3")
    flags: Any = {"dtype": "float32", "worker_threads": 1, "max_total_tokens": 4096}
    with LLM(str(llama_dir), enable_lora=True, **flags) as llm:
        third = LoRARequest("third", 1, path)
        completion = llm.generate(PROMPTS[0], GREEDY, lora_request=third)
        assert completion.token_ids == adapters.answers["a3"][0]
        assert llm.client.info()["adapters"]["pinned"] == []
        llm.generate(PROMPTS[0], GREEDY, lora_request=third._replace(pinned=True))
        assert llm.client.info()["adapters"]["pinned"] == ["third"]
        assert llm.generate(PROMPTS[0], GREEDY).token_ids == adapters.answers[""][0]


def test_a_wrong_adapter_ends_the_start_with_its_reason(
    llama_dir: Path, gpt2_dir: Path, tmp_path: Path
) -> None:
    other = make_adapter(gpt2_dir, tmp_path / "of-gpt2", seed=1)
    for value, part in (
        ("x", "NAME=PATH"),
        (f"x={tmp_path / 'none'}", str(tmp_path / "none")),
        (f"x={other}", "adapter 'x': "),
    ):
        flags = ["--model", str(llama_dir), "--lora-modules", value]
        process = launch("ipc", *flags, log=tmp_path / "log")
        assert process.wait(timeout=60) != 0
        wait_until(lambda part=part: part in (tmp_path / "log").read_text(), 5)  # type: ignore[misc]
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_receipts_name_the_adapter_and_a_journal_is_replayed_with_it(
    adapters: Adapters, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, path = tmp_path / "journal", tmp_path / "adapter"
    shutil.copytree(adapters.directory / "a1", path)
    flags = ["--model", str(llama_dir), "--worker-threads", "1", "--max-total-tokens", "4096",
             "--journal", str(journal), "--lora-modules", f"one={path}"]  # fmt: skip
    with running_server(tmp_path / "log", *flags) as server:
        with Client(server.endpoint) as client:
            answer = client.generate(PROMPTS[0], GREEDY, adapter="one", receipt=True)
            base = client.generate(PROMPTS[0], GREEDY, receipt=True)
        assert answer.receipt is not None and base.receipt is not None
        assert len(answer.receipt.adapter) == 64 and not base.receipt.adapter
        where = ["--journal", str(journal), "--endpoint", server.endpoint]
        assert main(["replay", answer.request_id, *where]) == replay.EXIT_EQUAL
        shutil.copytree(journal, tmp_path / "copied")
    where = ["--journal", str(tmp_path / "copied"), "--max-total-tokens", "4096"]
    assert main(["replay", answer.request_id, *where]) == replay.EXIT_EQUAL
    assert capsys.readouterr().out.count(f"equal: all {NUM_TOKENS} tokens") == 2
    shutil.copytree(adapters.directory / "a2", path, dirs_exist_ok=True)
    assert main(["replay", answer.request_id, *where]) == replay.EXIT_EQUAL  # with the copy
    shutil.rmtree(tmp_path / "copied" / "adapters")
    assert main(["replay", answer.request_id, *where]) == replay.EXIT_FAILED
    assert "load what" in capsys.readouterr().err
