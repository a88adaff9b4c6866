"""Heads that classify or rank: the scores of transformers, and equal bits in any batch."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from quadriga.sampling.pooling import CLASSIFY, IDENTITY, SIGMOID, SOFTMAX, Pooling
from tests.tiny_encoders import CLASSIFIERS, CONTEXT_LENGTH
from tests.unit.worker.vectors import vectors_of_each
from tests.unit.worker_driver import prompts_of, runner_of

LENGTHS = [2, 3, 17, 63, 64, 65, CONTEXT_LENGTH]
TYPED = ("bert",)  # their pairs have two types of tokens
MAX_ERROR = 2e-5


def logits_of(directory: Path, prompt: list[int], num_first: int) -> torch.Tensor:
    """Return transformers' logits `[labels]` of a text, whose tokens are of two types."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    types = {
        "token_type_ids": torch.tensor([[int(num_first <= place) for place in range(len(prompt))]])
    }
    with torch.inference_mode():
        return model.eval()(torch.tensor([prompt]), **(types if num_first else {})).logits[0]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("family", list(CLASSIFIERS))
def test_scores_are_those_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    directory = CLASSIFIERS[family](tmp_path / "model")
    runner = runner_of(directory, attention_backend=backend, page_size=16)
    firsts = [length // 2 if family in TYPED else 0 for length in LENGTHS]
    prompts = prompts_of(LENGTHS)
    expected = [logits_of(directory, *each) for each in zip(prompts, firsts, strict=True)]
    for activation, function in (
        (IDENTITY, lambda logits: logits),
        (SIGMOID, torch.sigmoid),
        (SOFTMAX, lambda logits: logits.softmax(-1)),
    ):
        asked = [Pooling(CLASSIFY, activation=activation, num_first=n, whole=True) for n in firsts]
        scores = vectors_of_each(runner, prompts, asked)
        errors = [
            float(abs(one - function(other).numpy()).max())
            for one, other in zip(scores, expected, strict=True)
        ]
        print(f"{family}, {backend}, {activation}: the largest error is {max(errors):.1e}")
        assert max(errors) < MAX_ERROR


def test_the_types_of_tokens_change_scores(tmp_path: Path) -> None:
    runner = runner_of(CLASSIFIERS["bert"](tmp_path / "model"), attention_backend="native")
    prompts = prompts_of([9, 9], seed=3)[:1] * 4
    asked = [Pooling(CLASSIFY, num_first=n, whole=True) for n in (0, 3, 8, 100)]
    none, many, one, beyond = (each[0] for each in vectors_of_each(runner, prompts, asked))
    assert len({none, many, one}) == 3
    assert beyond == none, "a slot forgets the types of the request before"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(dtype: str, tmp_path: Path) -> None:
    runner = runner_of(
        CLASSIFIERS["bert"](tmp_path / "model"), attention_backend="native", dtype=dtype,
        max_running_requests=64, max_total_tokens=64 * CONTEXT_LENGTH,
    )  # fmt: skip
    order = random.Random(1)
    lengths = [order.randint(2, CONTEXT_LENGTH) for _ in range(64)]
    prompts = prompts_of(lengths, seed=4)
    asked = [Pooling(CLASSIFY, num_first=n // 2, whole=True) for n in lengths]
    together = vectors_of_each(runner, prompts, asked)
    shuffled = order.sample(range(64), 64)
    other = vectors_of_each(runner, [prompts[n] for n in shuffled], [asked[n] for n in shuffled])
    for place, number in enumerate(shuffled):
        assert other[place].tobytes() == together[number].tobytes()
    for number in range(64):
        (alone,) = vectors_of_each(runner, [prompts[number]], [asked[number]])
        assert alone.tobytes() == together[number].tobytes()
    assert len({float(each[0]) for each in together}) > 60


def test_quantized_weights_leave_the_head_as_it_is(tmp_path: Path) -> None:
    directory = CLASSIFIERS["distilbert"](tmp_path / "model")
    prompts = prompts_of([3, 40], seed=5)
    asked = [Pooling(CLASSIFY, activation=SOFTMAX, whole=True)] * 2
    exact = vectors_of_each(runner_of(directory, attention_backend="native"), prompts, asked)
    flags = {"attention_backend": "native", "dtype": "bfloat16", "quantization": "int8"}
    rounded = vectors_of_each(runner_of(directory, **flags), prompts, asked)
    assert np.abs(np.array(exact) - np.array(rounded)).max() < 0.02
