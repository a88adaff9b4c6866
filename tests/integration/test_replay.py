"""Requests of a journal give the same tokens again, on the same server and on another one."""

import asyncio
import json
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.client.server import free_port
from quadriga.client import AsyncClient, Client, SamplingParams
from quadriga.client.receipts import Receipt, hash_ids
from quadriga.server.cli.main import main
from scheduler_proc.journal import replay
from tests.server import running_server

pytestmark = pytest.mark.timeout(240)
REQUESTS = [
    SamplingParams(max_new_tokens=30, temperature=1.0, n=2, ignore_eos=True),
    SamplingParams(max_new_tokens=30, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=30, temperature=1.0, regex="[a-f]{4,9}"),
    SamplingParams(max_new_tokens=40, temperature=1.0, json_schema={"type": "array"}),
    SamplingParams(max_new_tokens=40, temperature=1.5, top_p=0.9, stop=["a", "e"]),
    SamplingParams(max_new_tokens=40, temperature=1.2, bad_words=["the"], min_new_tokens=9),
    SamplingParams(max_new_tokens=30, temperature=1.0, first_token_ids=[40, 41, 42]),
]


def test_receipts_name_what_an_answer_is_a_function_of(llama_dir: Path, tmp_path: Path) -> None:
    port, text = free_port(), "The quick brown fox"
    flags = ["--model", str(llama_dir), "--worker-threads", "1", "--port", str(port)]
    drawn = SamplingParams(max_new_tokens=5, temperature=1.0, seed=7, n=2)
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        ids, info = client.tokenize(text), client.info()
        answer, again, other = (
            client.generate(prompt, params, receipt=True)
            for prompt, params in (
                (text, drawn),
                (ids, drawn),
                (text, msgspec.structs.replace(drawn, top_k=3)),
            )
        )
        first, second = answer.receipt, answer.others[0].receipt
        assert isinstance(first, Receipt)
        assert isinstance(second, Receipt)
        assert (first.seed, second.seed) == (7, 8)
        assert first.fingerprint == info["model_details"]["digest"]
        assert first.kernels == info["kernels"]
        assert first.prompt == second.prompt == hash_ids(ids)
        assert first.tokens == hash_ids(answer.token_ids) != second.tokens
        assert again.receipt == msgspec.structs.replace(first, request_id=again.request_id)
        assert other.receipt is not None
        assert other.receipt.params != first.params
        (chunk,) = (
            chunk
            for chunk in client.stream(ids, drawn, receipt=True)
            if chunk.index and chunk.completion
        )
        assert chunk.completion is not None
        assert chunk.completion.receipt is not None
        assert chunk.completion.receipt.tokens == second.tokens
        assert client.generate(text, drawn).receipt is None
        with pytest.raises(TypeError, match="receipt"):
            asyncio.run(_submit(server.endpoint))

        url = f"http://127.0.0.1:{port}/v1"
        body = {"prompt": text, "seed": 7, "n": 2, "max_tokens": 5, "receipt": True}
        receipts = post(f"{url}/completions", body)["receipts"]
        assert [receipt["tokens"] for receipt in receipts] == [first.tokens, second.tokens]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "receipt": True}
        answered = post(f"{url}/chat/completions", chat)
        rendered = client.tokenize([{"role": "user", "content": "Hi"}])
        assert answered["receipts"][0]["prompt"] == hash_ids(rendered)
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{url}/completions", {**body, "stream": True})
        assert refused.value.code == 400
        assert "receipt is set, and a stream has none" in refused.value.read().decode()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


async def _submit(endpoint: str) -> None:
    async with AsyncClient(endpoint) as client:
        client.submit("a", receipt=True)


def test_replays_are_equal_in_company_and_alone_and_differences_are_shown(
    llama_dir: Path,
    gpt2_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal, copied = tmp_path / "journal", tmp_path / "copied"
    flags = ["--dtype", "bfloat16", "--max-total-tokens", "8192"]
    model = ["--model", str(llama_dir), "--worker-threads", "1", "--journal", str(journal)]
    with running_server(tmp_path / "log", *model, *flags) as server:
        with Client(server.endpoint) as client, ThreadPoolExecutor(12) as threads:
            answers = list(
                threads.map(
                    lambda number: client.generate(
                        "The quick brown fox " * (number + 1), REQUESTS[number % len(REQUESTS)]
                    ),
                    range(12),
                )
            )
        first, *others = [answer.request_id for answer in answers]
        where = ["--journal", str(journal), "--endpoint", server.endpoint]
        assert main(["replay", "--list", "--journal", str(journal)]) == 0
        assert capsys.readouterr().out.count("tokens, ") == 12 + 2
        for arguments in ([first], [first, "--choice", "1"], *([other] for other in others)):
            assert main(["replay", *arguments, *where]) == replay.EXIT_EQUAL
            printed = capsys.readouterr().out
            assert printed.startswith("equal: all ")
            assert "the same model and kernels: native" in printed
        shutil.copytree(journal, copied)
    where = ["--journal", str(copied), "--max-total-tokens", "4096", "--worker-threads", "2"]
    assert main(["replay", first, *where, "--dtype", "bfloat16"]) == replay.EXIT_EQUAL
    assert "the same model and kernels: native" in capsys.readouterr().out

    with monkeypatch.context() as patch:
        patch.setattr(replay, "params_of", lambda _: SamplingParams(temperature=2.0, seed=1))
        assert main(["replay", first, *where, "--dtype", "float32"]) == replay.EXIT_DIFFERS
    printed = capsys.readouterr().out
    assert "differs at token 1 of 30 (position " in printed
    assert "other kernels: native" in printed
    other = ["--model", str(gpt2_dir)]
    assert main(["replay", first, *where, *other]) == replay.EXIT_FAILED
    assert "compare with a server of the same model" in capsys.readouterr().err
