"""Decisions of a whole server: those of transformers, and the same bits in any company."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from bench.client.server import free_port
from quadriga import Client, Decision, Question, SamplingParams
from quadriga.errors import InvalidRequest
from quadriga.server.cli.main import main
from scheduler_proc.journal import replay
from tests.server import running_server

pytestmark = pytest.mark.timeout(240)

STATE = "The quick brown fox jumps over the lazy dog. " * 6
QUESTIONS = [
    Question("The dog is lazy."),
    Question("Which animal?", ["fox", "a lazy dog", "the quick brown fox"]),
    Question("How quick?", {"slow": "", "quick": "it jumps", "very very quick": ""}),
    Question("Which letter?", [chr(ord("a") + number) for number in range(12)]),
]
FLAGS = ("--worker-threads", "1", "--max-total-tokens", "8192")


def expected(
    directory: Path, model: Any, prompt: str, labels: list[str]
) -> tuple[list[float], float]:
    """Return the probabilities of labels after a prompt, and their sum before they are divided."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    before = tokenizer(prompt)["input_ids"]
    products = []
    for label in labels:
        ids = tokenizer(prompt + label)["input_ids"]
        assert ids[: len(before)] == before
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        places = range(len(before), len(ids))
        products.append(sum(logprobs[place - 1, ids[place]].item() for place in places))
    masses = torch.tensor(products, dtype=torch.float64).exp()
    return (masses / masses.sum()).tolist(), masses.sum().item()


def without_ids(decisions: list[Decision]) -> list[Any]:
    """Return all that a repeat has, too: everything but the ids in the receipts."""
    anonymous: list[Any] = msgspec.to_builtins(decisions)
    for decision in anonymous:
        for receipt in decision["receipts"]:
            del receipt["request_id"]
    return anonymous


def test_probabilities_are_those_of_transformers(
    llama_dir: Path, model: Any, tmp_path: Path
) -> None:
    flags = ("--model", str(llama_dir), "--dtype", "float32", *FLAGS, "--no-http")
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        for question, decision in zip(QUESTIONS, client.decide(STATE, QUESTIONS), strict=True):
            labels = list(decision.probabilities)
            text = (
                f"Is this the case, according to the above?\n{question.instructions}\n\n"
                "Answer with Yes or No only."
            )
            if question.labels:
                reasons = question.labels if isinstance(question.labels, dict) else {}
                listed = [f"- {each}: {why}" if (why := reasons.get(each)) else f"- {each}"
                          for each in labels]  # fmt: skip
                text = "\n".join([f"{question.instructions}\n\nAnswer with exactly one of these,"
                                  " and nothing else:", *listed])  # fmt: skip
            (prompt,) = (
                client.detokenize(client.tokenize(turns), skip_special_tokens=False)
                for turns in [[{"role": "user", "content": f"{STATE}\n\n{text}"}]]
            )
            probabilities, mass = expected(llama_dir, model, prompt, labels)
            assert list(decision.probabilities.values()) == pytest.approx(probabilities, abs=1e-4)
            assert decision.label_mass == pytest.approx(min(1.0, mass), abs=1e-4)
        assert sum(decision.probabilities.values()) == pytest.approx(1)
        with pytest.raises(InvalidRequest, match=r"questions\[0\].labels has 'a' twice"):
            client.decide(STATE, [Question("x", ["a", "a"])])
        with pytest.raises(InvalidRequest, match="questions is empty"):
            client.decide(STATE, [])


def test_bits_are_equal_alone_in_company_and_without_the_cache(
    llama_dir: Path, tmp_path: Path
) -> None:
    flags = ("--model", str(llama_dir), *FLAGS, "--no-http")
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        together = without_ids(client.decide(STATE, QUESTIONS, receipt=True))
        alone = [client.decide(STATE, [each], receipt=True)[0] for each in QUESTIONS[::-1]][::-1]
        salted = client.decide(STATE, QUESTIONS, receipt=True, cache_salt="own")
        with ThreadPoolExecutor(8) as threads:
            chats = [
                threads.submit(client.generate, STATE[:number], SamplingParams(max_tokens=40))
                for number in range(20, 26)
            ]
            beside = client.decide(STATE, QUESTIONS, receipt=True)
            for chat in chats:
                chat.result()
        assert together == without_ids(alone) == without_ids(salted) == without_ids(beside)
    uncaching = (*flags, "--no-prefix-cache")
    log = tmp_path / "other"
    with running_server(log, *uncaching) as server, Client(server.endpoint) as client:
        uncached = client.decide(STATE, QUESTIONS, receipt=True)
    assert without_ids(uncached) == together


def test_a_salt_keeps_the_cache_of_an_input_apart(llama_dir: Path, tmp_path: Path) -> None:
    flags = ("--model", str(llama_dir), *FLAGS, "--no-http")
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        cached = [
            client.generate(STATE, SamplingParams(max_tokens=1), cache_salt=salt).usage
            for salt in ("", "a", "", "a", "b")
        ]
        assert [each.cached_tokens > 0 for each in cached] == [False, False, True, True, False]
        with pytest.raises(InvalidRequest, match="cache_salt has 300 characters"):
            client.generate(STATE, cache_salt="x" * 300)


def test_decisions_have_receipts_and_are_replayed_to_the_same_bits(
    llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, port = tmp_path / "journal", free_port()
    flags = ("--model", str(llama_dir), *FLAGS, "--journal", str(journal), "--port", str(port))
    question = {
        "type": "choice", "instructions": "Which animal?",
        "choices": [{"value": "fox"}, {"value": "a lazy dog"}],
    }  # fmt: skip
    body = {"input": STATE, "questions": [question], "receipt": True}
    with running_server(tmp_path / "log", *flags) as server:
        url = f"http://127.0.0.1:{port}/v1/decisions"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as response:
            (answer,) = json.load(response)["answers"]
        with Client(server.endpoint) as client:
            question_again = Question("Which animal?", ["fox", "a lazy dog"])
            (again,) = client.decide(STATE, [question_again], receipt=True)
        assert again.probabilities == {
            each["value"]: each["probability"] for each in answer["probabilities"]
        }
        receipts = answer["receipts"]
        assert [each["vector"] for each in receipts] == [each.vector for each in again.receipts]
        assert len({each["vector"] for each in receipts}) == len(receipts) > 1
        where = ["--journal", str(journal), "--endpoint", server.endpoint]
        for receipt in receipts:
            assert main(["replay", receipt["request_id"], *where]) == replay.EXIT_EQUAL
            printed = capsys.readouterr().out
            assert "log-probabilities of" in printed
            assert "the same model and kernels" in printed
        assert main(["replay", "--list", "--journal", str(journal)]) == 0
        assert "log-probabilities, stop" in capsys.readouterr().out
