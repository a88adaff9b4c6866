"""Tests that need a GPU.

One command, on a machine that has one:

    python -m pytest tests/gpu tests/unit/gpu

The files of tests/unit run on the GPU there instead of in Triton's interpreter.
"""

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from quadriga.client import Client, SamplingParams
from tests.server import running_server
from tests.tiny_models import write_tokenizer
from tests.unit.drafting import FixedDrafter, generate, no_rules, penalties, rows_of, with_logprobs
from tests.unit.worker_driver import Driver, prompts_of, runner_of
from worker_proc.step.runner import Runner

# Triton comes with a GPU's torch, and is not needed to collect these tests.
STEPS_VARIABLE, PLAIN = "QUADRIGA_GPU_STEPS", "plain"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
LARGE_POOL = 32_768


@pytest.fixture(scope="module")
def gpt2_full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 at its full size, with random weights."""
    directory = tmp_path_factory.mktemp("gpt2")
    end = write_tokenizer(directory)
    torch.manual_seed(3)
    GPT2LMHeadModel(GPT2Config(bos_token_id=end, eos_token_id=end)).save_pretrained(directory)
    return directory


def runner(directory: Path, **flags: object) -> Runner:
    flags = {"device": "cuda", "max_total_tokens": LARGE_POOL, "page_size": 16, **flags}
    runner = runner_of(directory, max_running_requests=64, **flags)
    runner.warm_up()
    return runner


def generated(runner: Runner, lengths: list[int], count: int) -> list[list[int]]:
    driver = Driver(runner)
    requests = [driver.add(prompt) for prompt in prompts_of(lengths, vocab_size=50_000)]
    driver.generate(requests, count, chunk=512)
    return [request.output for request in requests]


def test_graphs_give_the_tokens_of_transformers(gpt2_full: Path) -> None:
    lengths = [1, 17, 300, 900]
    model = AutoModelForCausalLM.from_pretrained(gpt2_full, dtype=torch.float32).to("cuda")  # type: ignore[arg-type]
    expected = []
    for prompt in prompts_of(lengths, vocab_size=50_000):
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16,
                                min_new_tokens=16, do_sample=False, pad_token_id=0)  # fmt: skip
        expected.append(output[0, len(prompt) :].tolist())
    assert generated(runner(gpt2_full), lengths, 16) == expected


def test_flashinfer_begins_every_text_as_the_kernel_does(gpt2_full: Path) -> None:
    """Two ways to add up in bfloat16: nearly the same numbers, and later a token may differ."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    lengths = [1, 17, 300, 900]
    ours = generated(runner(gpt2_full, dtype="bfloat16"), lengths, 16)
    flags = {"dtype": "bfloat16", "attention_backend": "flashinfer"}
    theirs = generated(runner(gpt2_full, **flags), lengths, 16)
    assert [tokens[:4] for tokens in theirs] == [tokens[:4] for tokens in ours]


@pytest.mark.parametrize("lengths", [[300], [1, 17, 300, 900]])
def test_the_fastest_steps_begin_every_text_as_plain_ones_do(
    gpt2_full: Path, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, whose rounding may change a later token."""
    ours = generated(runner(gpt2_full, dtype="bfloat16"), lengths, 16)
    monkeypatch.setenv(STEPS_VARIABLE, PLAIN)
    plain = generated(runner(gpt2_full, dtype="bfloat16"), lengths, 16)
    assert [tokens[:4] for tokens in ours] == [tokens[:4] for tokens in plain]


def test_deterministic_output_is_the_same_alone_and_among_sixty(gpt2_full: Path) -> None:
    flags = {"dtype": "bfloat16", "enable_deterministic_inference": True}
    one = runner(gpt2_full, **flags)
    lengths = [100 + 7 * i for i in range(60)]
    together = generated(one, lengths, 20)
    del one
    alone = runner(gpt2_full, **flags)
    driver = Driver(alone)
    request = driver.add(prompts_of(lengths, vocab_size=50_000)[7])
    driver.generate([request], 20)
    assert request.output == together[7]


@pytest.mark.parametrize(
    ("flags", "temperature"),
    [({}, 0.0), ({"dtype": "bfloat16", "enable_deterministic_inference": True}, 1.0)],
)
def test_tokens_are_the_same_with_right_and_wrong_drafts(
    gpt2_full: Path, flags: dict[str, object], temperature: float
) -> None:
    one = runner(gpt2_full, speculative_method="ngram", **flags)
    prompts = prompts_of([5, 90, 1], vocab_size=50_000)
    for rules in (no_rules, penalties, with_logprobs):
        new = rows_of(prompts, rules, temperature)
        one.drafter = None
        expected, num_steps = generate(one, new, 0)
        answers = {slot: prompts[slot] + tokens for slot, (tokens, _) in enumerate(expected)}
        for wrong_every in (3, 1000):
            one.drafter = FixedDrafter(one, answers, wrong_every)
            got, num_drafted_steps = generate(one, new, 4)
            assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
            assert num_drafted_steps < num_steps


def test_a_graph_is_faster_than_its_kernels_one_by_one(gpt2_full: Path) -> None:
    seconds = []
    for flags in ({}, {"disable_cuda_graph": True}):
        one = runner(gpt2_full, dtype="bfloat16", **flags)
        driver = Driver(one)
        warm_up = [driver.add(prompt) for prompt in prompts_of([8] * 8)]
        driver.generate(warm_up, 4)
        requests = [driver.add(prompt) for prompt in prompts_of([9] * 8, seed=1)]
        began = time.perf_counter()
        driver.generate(requests, 50)
        seconds.append(time.perf_counter() - began)
    assert seconds[0] < seconds[1]


@pytest.mark.timeout(180)
def test_a_server_sizes_its_pool_and_answers(gpt2_full: Path, tmp_path: Path) -> None:
    flags = ["--model", str(gpt2_full), "--device", "cuda", "--dtype", "bfloat16"]
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        assert client.info()["attention_backend"] == "triton"
        params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=32, ignore_eos=True)
        assert client.generate("One,", params).text == client.generate("One,", params).text
        assert client.info()["pages_total"] > 1000


@pytest.mark.timeout(180)
def test_a_server_that_drafts_gives_the_tokens_of_one_that_does_not(
    gpt2_full: Path, tmp_path: Path
) -> None:
    answers, num_right = [], 0.0
    for method in ("none", "ngram"):
        flags = ["--model", str(gpt2_full), "--device", "cuda", "--dtype", "bfloat16"]
        flags += ["--enable-deterministic-inference", "--speculative-method", method]
        with running_server(tmp_path / method, *flags) as server, Client(server.endpoint) as client:
            params = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
            answers.append([client.generate("One,", params).token_ids for _ in range(2)])
            num_right = client.info().get("spec_decode_num_accepted_tokens_total", 0.0)
    assert answers[0] == answers[1]
    assert num_right > 100, "the second answer is that of the first"


@pytest.mark.timeout(180)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_two_gpus_give_the_tokens_of_one(gpt2_full: Path, tmp_path: Path) -> None:
    answers = []
    for tp in ("1", "2"):
        flags = ["--model", str(gpt2_full), "--device", "cuda", "--dtype", "float32", "--tp", tp]
        with running_server(tmp_path / tp, *flags) as server, Client(server.endpoint) as client:
            params = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)
            answers.append(client.generate("One,", params).token_ids)
    assert answers[0] == answers[1]
