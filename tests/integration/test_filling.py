"""Filling in the middle through the whole server: the marks of the vocabulary reach the prompt."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from quadriga.server.models.formats.tokenizer import load_tokenizer
from tests.gateway import MODEL, running_gateway
from tests.server import running_server
from tests.tiny_models import VOCAB_SIZE, tiny_llama

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose vocabulary has the marks behind its other tokens."""
    directory = tiny_llama(tmp_path_factory.mktemp("filling") / "model")
    tokenizer = load_tokenizer(directory)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--model", str(model_dir), "--dtype", "float32", "--worker-threads", "1"]
    log = tmp_path_factory.mktemp("filling-server") / "log"
    with (
        running_server(log, *flags) as server,
        running_gateway(server.endpoint, model_dir) as address,
    ):
        yield address


def fill(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/infill", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def test_the_prompt_of_a_suffix_has_the_ids_of_the_marks(url: str, model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    answer = client.completions.create(
        model=MODEL, prompt="def f(", suffix="):\n", max_tokens=4, extra_body={"prompt_logprobs": 0}
    )
    given = answer.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert [int(next(iter(token))) for token in given[1:]] == [
        *ids("def f("),
        tokenizer.token_to_id("<|fim_suffix|>"),
        *ids("):\n"),
        tokenizer.token_to_id("<|fim_middle|>"),
    ]
    assert given[0] is None and answer.usage is not None
    assert answer.usage.prompt_tokens == len(given)


def test_infill_equals_the_completion_of_the_same_prompt_whole_and_streamed(url: str) -> None:
    gap: dict[str, Any] = {"input_prefix": "a b", "input_suffix": "c", "n_predict": 12, "seed": 3}
    whole = fill(url, **gap)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    plain = client.completions.create(model=MODEL, prompt="a b", suffix="c", max_tokens=12, seed=3)
    assert whole["content"] == plain.choices[0].text
    assert plain.usage is not None and whole["tokens_evaluated"] == plain.usage.prompt_tokens
    body = json.dumps(gap | {"stream": True}).encode()
    with urllib.request.urlopen(f"{url}/infill", body, timeout=30) as response:
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["tokens_predicted"] == whole["tokens_predicted"]
    only_prompt = fill(url, **gap | {"n_predict": 0, "samplers": []})
    assert (only_prompt["content"], only_prompt["tokens_predicted"]) == ("", 0)
