"""Decisions of the built-in model in float32 are those of transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from bench.decisions.__main__ import known_answers
from quadriga.client import Client
from quadriga.client.decisions import AskedQuestion
from quadriga.server.config.engine_args import BUILTIN_MODEL, ModelArgs
from quadriga.server.models.resolve import resolve_model
from tests.server import Server

NUM_STATES = 3


@pytest.fixture(scope="module")
def reference() -> Iterator[torch.nn.Module]:
    weights = resolve_model(ModelArgs(BUILTIN_MODEL)).weights
    assert isinstance(weights, Path)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # Several threads wait for each other without end where other processes have the cores.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield model
    torch.set_num_threads(num_threads)


def expected_masses(
    client: Client, reference: torch.nn.Module, state: str, asked: AskedQuestion
) -> torch.Tensor:
    """Return the probability of each label among all texts, by transformers."""
    chat = [{"role": "user", "content": f"{state}\n\n{asked.text}"}]
    prompt = client.detokenize(client.tokenize(chat), skip_special_tokens=False)
    before = client.tokenize(prompt)
    products = []
    for label in asked.labels:
        ids = client.tokenize(prompt + label)
        assert ids[: len(before)] == before
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        places = range(len(before), len(ids))
        products.append(sum(logprobs[place - 1, ids[place]] for place in places))
    return torch.stack(products).exp()


@pytest.mark.timeout(300)
def test_probabilities_in_float32_are_those_of_transformers(
    builtin_server: Server, reference: torch.nn.Module
) -> None:
    with Client(builtin_server.endpoint) as client:
        for state, known in known_answers()[:NUM_STATES]:
            questions = [each.question for each in known]
            for question, decision in zip(questions, client.decide(state, questions), strict=True):
                asked = AskedQuestion.of(question, "labels")
                masses = expected_masses(client, reference, state, asked)
                probabilities = (masses / masses.sum()).tolist()
                found = list(decision.probabilities.values())
                assert found == pytest.approx(probabilities, abs=1e-4)
                assert decision.label_mass == pytest.approx(masses.sum().item(), abs=1e-4)
