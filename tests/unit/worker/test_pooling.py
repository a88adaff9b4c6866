"""Vectors of texts against the hidden states of transformers, and their bits in any batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.sampling.pooling import CLS, LAST, LOGPROBS, MEAN, POOLINGS, WEIGHTED_MEAN, Pooling
from tests.tiny_models import FAMILIES
from tests.unit.worker.vectors import vectors_of
from tests.unit.worker_driver import Driver, prompts_of, runner_of
from worker_proc.step import pooling as pooling_step

LENGTHS = [1, 5, 33]
# Norms with and without biases and offsets, before and after the layers.
CHOSEN = ["llama", "gpt2", "gemma3_text", "olmo2", "opt", "qwen3"]


def expected(states: torch.Tensor, method: str) -> torch.Tensor:
    """Pool hidden states `[tokens, hidden]` as the definitions say."""
    weights = torch.arange(1.0, len(states) + 1)[:, None]
    return {
        LAST: states[-1],
        CLS: states[0],
        MEAN: states.mean(0),
        WEIGHTED_MEAN: (weights * states).sum(0) / weights.sum(),
    }[method]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("family", [name for name in CHOSEN if name in FAMILIES])
def test_vectors_are_those_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    directory = FAMILIES[family](tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = prompts_of(LENGTHS)
    runner = runner_of(directory, attention_backend=backend)
    for method in POOLINGS:
        vectors = vectors_of(runner, prompts, Pooling(method))
        for prompt, vector in zip(prompts, vectors, strict=True):
            with torch.inference_mode():
                states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1]
            wanted = expected(states[0], method).numpy()
            wanted = wanted / np.linalg.norm(wanted)
            assert vector @ wanted > 0.99999, (method, len(prompt))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(dtype: str, tmp_path: Path) -> None:
    directory = FAMILIES["llama"](tmp_path / "model")
    runner = runner_of(directory, attention_backend="native", dtype=dtype)
    prompts = prompts_of([1, 2, 17, 17, 40, 64], seed=4)
    for method in POOLINGS:
        together = vectors_of(runner, prompts, Pooling(method))
        reversed_order = vectors_of(runner, prompts[::-1], Pooling(method))[::-1]
        for prompt, first, second in zip(prompts, together, reversed_order, strict=True):
            (alone,) = vectors_of(runner, [prompt], Pooling(method))
            assert alone.tobytes() == first.tobytes() == second.tobytes()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_log_probabilities_are_those_of_transformers(backend: str, tmp_path: Path) -> None:
    directory = FAMILIES["llama"](tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = prompts_of([2, 9, 33])
    runner = runner_of(directory, attention_backend=backend)
    of_ids = vectors_of(runner, prompts, Pooling(LOGPROBS, token_ids=[7, 300, 7]))
    of_last = vectors_of(runner, prompts[1:], Pooling(LOGPROBS, num_last=8))
    for prompt, vector in zip(prompts, of_ids, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        np.testing.assert_allclose(vector, logprobs[-1, [7, 300, 7]], atol=1e-4)
        if len(prompt) > 8:
            scored = of_last[prompts.index(prompt) - 1]
            places = range(len(prompt) - 9, len(prompt) - 1)
            expected_last = [float(logprobs[place, prompt[place + 1]]) for place in places]
            np.testing.assert_allclose(scored, expected_last, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_largest_log_probability_follows_those_asked_for(backend: str, tmp_path: Path) -> None:
    runner = runner_of(FAMILIES["llama"](tmp_path / "model"), attention_backend=backend)
    (prompt,) = prompts_of([12])
    every_id = list(range(runner.table.vocab_size))
    (all_ids,) = vectors_of(runner, [prompt], Pooling(LOGPROBS, token_ids=every_id))
    pooling = Pooling(LOGPROBS, token_ids=[7, 9], with_largest=True)
    (of_ids,) = vectors_of(runner, [prompt], pooling)
    assert of_ids.tolist() == [all_ids[7], all_ids[9], all_ids.max()]
    likeliest = [*prompt, int(all_ids.argmax()), 5]
    pooling = Pooling(LOGPROBS, num_last=2, with_largest=True)
    (of_last,) = vectors_of(runner, [likeliest], pooling)
    assert len(of_last) == 4
    assert of_last[0] == of_last[2], "the first one is the likeliest"
    assert of_last[1] < of_last[3]


def test_log_probabilities_of_many_rows_have_the_bits_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = FAMILIES["llama"](tmp_path / "model")
    runner = runner_of(directory, attention_backend="native", dtype="bfloat16")
    prompts, asked = prompts_of([9, 12, 17, 33], seed=5), Pooling(LOGPROBS, num_last=8)
    alone = [vectors_of(runner, [prompt], asked)[0].tobytes() for prompt in prompts]
    for most in (64, 3):
        monkeypatch.setattr(pooling_step, "MAX_LOGIT_ROWS", most)
        assert [each.tobytes() for each in vectors_of(runner, prompts, asked)] == alone


def test_dimensions_are_cut_before_the_vector_is_normalized(tmp_path: Path) -> None:
    runner = runner_of(FAMILIES["llama"](tmp_path / "model"))
    (prompt,) = prompts_of([9])
    (raw,) = vectors_of(runner, [prompt], Pooling(MEAN, normalize=False))
    (cut,) = vectors_of(runner, [prompt], Pooling(MEAN, dimensions=8))
    np.testing.assert_allclose(cut, raw[:8] / np.linalg.norm(raw[:8]), rtol=1e-6)
    assert np.linalg.norm(raw) != pytest.approx(1)


def test_a_vector_and_tokens_are_computed_in_one_step(tmp_path: Path) -> None:
    runner = runner_of(FAMILIES["llama"](tmp_path / "model"), attention_backend="native")
    prompt, other = prompts_of([12, 20])
    driver = Driver(runner)
    alone = driver.add(other)
    driver.generate([alone], 4)
    runner.table.release_all()
    (vector,) = vectors_of(runner, [prompt], Pooling(MEAN))
    driver = Driver(runner)
    talking = driver.add(other)
    driver.step((talking, 20))
    embedded = driver.add(prompt)
    driver.set_pooling(embedded, Pooling(MEAN))
    result = runner.run(driver.plan([(talking, 1), (embedded, 12)]))
    assert np.frombuffer(result.token_ids, dtype="<i4").tolist() == [alone.output[1], -1]
    assert result.vectors[0].vector == vector.tobytes()


def test_a_vector_that_is_not_finite_fails_its_request_alone(tmp_path: Path) -> None:
    runner = runner_of(FAMILIES["llama"](tmp_path / "model"))
    norm = runner.engine.output_norm
    assert norm is not None
    norm._gain[3] = float("inf")
    prompt, other = prompts_of([5, 6])
    driver = Driver(runner)
    embedded, talking = driver.add(prompt), driver.add(other)
    driver.set_pooling(embedded, Pooling(LAST))
    result = runner.run(driver.plan([(embedded, 5), (talking, 6)]))
    assert [(row.row, row.code) for row in result.failed] == [(0, "non_finite_vector")]
