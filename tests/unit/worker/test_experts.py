"""Mixtures of experts: the kernels compute what plain torch does; MXFP4 checkpoints are read."""

from pathlib import Path

import pytest
import torch

from quadriga.errors import ModelError
from tests.references import greedy_of
from tests.tiny_experts import EXPERTS, tiny_gpt_oss, tiny_mixtral, tiny_mxfp4
from tests.unit.worker.compared_engines import (
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    Compared,
    drive,
    native,
    reference,
    round_all_but_routers,
)
from tests.unit.worker_driver import Driver, prompts_of, runner_of
from worker_proc.loading.checkpoints import with_mxfp4

COUNT = 8
LENGTHS = [5, 17, 40, 90]


@pytest.fixture(scope="module", params=list(EXPERTS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return EXPERTS[request.param](tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("threads", [1, 2])
def test_every_step_has_the_numbers_of_plain_torch(directory: Path, threads: int) -> None:
    ours = native(directory, torch.float32, 16, threads)
    compared = Compared(ours, reference(directory, torch.float32, 16), TOLERANCE[torch.float32])
    drive(compared, torch.float32, 16, seed=3)


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def all_chosen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of which each token takes all experts, so that rounding changes no choice."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "mixtral":
        return tiny_mixtral(directory, num_experts_per_tok=5)
    return tiny_gpt_oss(directory, num_experts_per_tok=6)


def test_bfloat16_has_nearly_the_numbers_of_plain_torch(all_chosen: Path) -> None:
    ours = native(all_chosen, torch.bfloat16, 16)
    theirs = reference(all_chosen, torch.bfloat16, 16)
    drive(Compared(ours, theirs, TOLERANCE[torch.bfloat16]), torch.bfloat16, 16, seed=3)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_quantized_experts_compute_nearly_what_their_rounded_weights_say(
    all_chosen: Path, dtype: torch.dtype, bits: int
) -> None:
    theirs = reference(all_chosen, dtype, 16)
    round_all_but_routers(theirs, bits)
    ours = native(all_chosen, dtype, 16, bits=bits)
    drive(Compared(ours, theirs, QUANTIZED_TOLERANCE), dtype, 16, seed=7)


def test_mxfp4_weights_of_gpt_oss_give_the_tokens_of_their_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same model in both forms; transformers reads the decoded one."""
    decoded, stored = tiny_mxfp4(tmp_path)
    prompts = prompts_of(LENGTHS)
    expected = greedy_of(decoded, prompts, COUNT)
    for backend in ("torch", "native"):
        driver = Driver(runner_of(stored, attention_backend=backend))
        requests = [driver.add(prompt) for prompt in prompts]
        driver.generate(requests, COUNT, chunk=50)
        assert [request.output for request in requests] == expected
    assert "MXFP4 weights become float32, about 8 times their size" in caplog.text


def test_mxfp4_codes_without_scales_are_refused() -> None:
    tensors = [("experts.down_proj_blocks", torch.zeros(1, 2, 1, 16, dtype=torch.uint8))]
    with pytest.raises(ModelError, match=r"has experts\.down_proj_blocks, but not the other one"):
        list(with_mxfp4(iter(tensors)))
