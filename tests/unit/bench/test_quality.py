"""Quality figures of a variant, for numbers made by hand and for a tiny model."""

import math
from pathlib import Path

import numpy as np
import pytest

from bench import quality
from bench.quality import (
    Score,
    ScoredTexts,
    Surprise,
    common_prefix,
    divergences,
    manual_prose,
    parse,
    score_reference,
    score_variant,
    table,
    texts_of,
)
from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from tests.tiny_models import SENTENCES, tiny_llama

UNIFORM = np.full((2, 4), math.log(1 / 4), dtype=np.float32)


def test_the_perplexity_of_even_odds_is_the_number_of_choices() -> None:
    surprise = Surprise()
    surprise.add(UNIFORM, [3, 1])
    surprise.add(UNIFORM, [0])
    assert surprise.perplexity() == pytest.approx(4)


def test_distributions_diverge_from_themselves_by_nothing() -> None:
    halves = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], dtype=np.float32))
    assert divergences(halves, halves) == pytest.approx([0])
    assert divergences(halves, UNIFORM[:1]) == pytest.approx([math.log(4) - 1.75 * math.log(2)])


def test_a_common_prefix_ends_at_the_first_other_token() -> None:
    assert common_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert common_prefix([1, 2], [1, 2]) == 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    directory = tiny_llama(tmp_path_factory.mktemp("model"))
    config = ServerConfig().replace(model=str(directory), worker_threads=1, device="cpu")
    return config.replace(dtype="float32")


@pytest.fixture(scope="module")
def texts(model: ServerConfig) -> ScoredTexts:
    return texts_of(resolve_model(model.model), " ".join(SENTENCES) * 40)


def test_a_text_is_cut_into_windows_and_prompts(texts: ScoredTexts) -> None:
    assert {len(window) for window in texts.windows[:-1]} == {256}
    assert len(texts.prompts) == 32
    assert {len(prompt) for prompt in texts.prompts} == {64}
    assert texts.continued == 64


def test_the_reference_held_against_itself_is_the_same(
    model: ServerConfig, texts: ScoredTexts, tmp_path: Path
) -> None:
    few = ScoredTexts(texts.windows[:2], texts.prompts[:4], continued=6)
    reference = score_reference(model, few, tmp_path / "kept.npy")
    same = score_variant(model, few, tmp_path / "kept.npy", reference)
    assert same.perplexity == reference.perplexity
    assert same.divergence == pytest.approx(0)
    assert (same.agreement, same.prefix) == (1, 6)


def test_a_coarser_variant_diverges_a_little(
    model: ServerConfig, texts: ScoredTexts, tmp_path: Path
) -> None:
    few = ScoredTexts(texts.windows[:2], texts.prompts[:4], continued=6)
    reference = score_reference(model, few, tmp_path / "kept.npy")
    coarse = score_variant(model.replace(dtype="bfloat16"), few, tmp_path / "kept.npy", reference)
    assert coarse.divergence is not None
    assert 0 < coarse.divergence < 0.01
    assert coarse.perplexity == pytest.approx(reference.perplexity, rel=0.01)


def test_measured_logprobs_equal_those_of_transformers(
    model: ServerConfig, texts: ScoredTexts, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    few = ScoredTexts(texts.windows[:1], texts.prompts[:1], continued=1)
    ids = torch.tensor(few.windows)
    theirs = AutoModelForCausalLM.from_pretrained(model.model.model, dtype=torch.float32)
    with torch.inference_mode():
        expected = math.exp(theirs(ids, labels=ids).loss.item())
    found = score_reference(model, few, tmp_path / "kept.npy")
    assert found.perplexity == pytest.approx(expected, rel=1e-4)


def test_a_table_has_the_reference_first_and_says_how_far_the_others_are() -> None:
    scores = {
        "float32": Score(20.0, [[1, 2]]),
        "int8": Score(21.0, [[1, 3]], divergence=0.0123, agreement=0.97, prefix=1.0),
    }
    lines = table(scores).splitlines()
    assert lines[2] == "| float32 | 20.000 |  |  |  |"
    assert lines[3] == "| int8 | 21.000 (+5.00%) | 0.01230 | 97.0% | 1.0 |"


def test_flags_before_the_variants_go_for_all_and_not_for_the_reference() -> None:
    variants, _ = parse(
        ["--worker-threads", "1", "--page-size", "32", "--variant", "a: --dtype bfloat16"]
    )
    assert variants["a"].worker.page_size == 32
    reference = quality.reference_of(variants["a"]).worker
    assert (reference.dtype, reference.worker_threads, reference.page_size) == ("float32", 1, 16)


def test_variants_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ConfigError, match="is no variant"):
        parse(["--variant", "--dtype bfloat16"])
    with pytest.raises(ConfigError, match="on one model"):
        parse(["--variant", "a: ", "--variant", "b: --model gpt2"])


def test_a_text_that_is_too_short_is_refused(model: ServerConfig) -> None:
    with pytest.raises(ConfigError, match="at least 2048 are needed"):
        texts_of(resolve_model(model.model), "Too short.")


def test_the_manual_has_prose_enough() -> None:
    text = manual_prose()
    assert 40_000 <= len(text) < 42_000
    assert ">>>" not in text
