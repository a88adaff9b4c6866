"""Requests of a journal give the same tokens again, on the same server and on another one."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quadriga.cli.main import main
from quadriga.client import Client, SamplingParams
from scheduler_proc.replay import command
from tests.server import running_server

pytestmark = pytest.mark.timeout(240)
REQUESTS = [
    SamplingParams(max_new_tokens=30, temperature=1.0, n=2),
    SamplingParams(max_new_tokens=30, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=30, temperature=1.0, regex="[a-f]{4,9}"),
    SamplingParams(max_new_tokens=40, temperature=1.0, json_schema={"type": "array"}),
    SamplingParams(max_new_tokens=40, temperature=1.5, top_p=0.9, stop=["a", "e"]),
    SamplingParams(max_new_tokens=40, temperature=1.2, bad_words=["the"], min_new_tokens=9),
]


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
            assert main(["replay", *arguments, *where]) == command.EXIT_EQUAL
            printed = capsys.readouterr().out
            assert printed.startswith("equal: all ")
            assert "the same model and kernels: native" in printed
        shutil.copytree(journal, copied)
    where = ["--journal", str(copied), "--max-total-tokens", "4096", "--worker-threads", "2"]
    assert main(["replay", first, *where, "--dtype", "bfloat16"]) == command.EXIT_EQUAL
    assert "the same model and kernels: native" in capsys.readouterr().out

    with monkeypatch.context() as patch:
        patch.setattr(command, "params_of", lambda _: SamplingParams(temperature=2.0, seed=1))
        assert main(["replay", first, *where, "--dtype", "float32"]) == command.EXIT_DIFFERS
    printed = capsys.readouterr().out
    assert "differs at token 1 of 30 (position " in printed
    assert "other kernels: native" in printed
    other = ["--model", str(gpt2_dir)]
    assert main(["replay", first, *where, *other]) == command.EXIT_FAILED
    assert "compare with a server of the same model" in capsys.readouterr().err
