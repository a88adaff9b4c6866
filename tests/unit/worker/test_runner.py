"""The runner against transformers: the same greedy tokens, however the work is cut up."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quadriga.errors import ServerFailed
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import NewSlot
from tests.references import greedy_of
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3
from tests.unit.worker_driver import Driver, failures_of_unknown_ids, plan_of, prompts_of, runner_of
from worker_proc.engines import torch_engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.runner import Runner

COUNT = 12
LENGTHS = [1, 2, 5, 8, 17, 33, 64]
Builder = Callable[[Path], Path]
BUILDERS: dict[str, Builder] = {
    "gpt2": tiny_gpt2,
    "llama_tied": tiny_llama,
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "llama_untied": lambda path: tiny_llama(path, tie=False),
    "llama_biased": lambda path: tiny_llama(path, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama_scaled": lambda path: tiny_llama(
        path,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


class Case:
    """A model, prompts, and the tokens that transformers generates for them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prompts = prompts_of(LENGTHS)
        self.expected = greedy_of(directory, self.prompts, COUNT)

    def runner(self) -> Runner:
        return runner_of(self.directory)


@pytest.fixture(scope="module", params=list(BUILDERS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(BUILDERS[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tiny_llama(tmp_path_factory.mktemp("llama")))


def test_a_request_alone_gets_the_tokens_of_transformers(case: Case) -> None:
    driver = Driver(case.runner())
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        request = driver.add(prompt)
        driver.generate([request], COUNT)
        assert request.output == expected
        driver.release(request)


def test_requests_in_one_batch_get_the_same_tokens_as_alone(case: Case) -> None:
    driver = Driver(case.runner(), seed=1)
    requests = [driver.add(prompt) for prompt in case.prompts]
    driver.generate(requests, COUNT)
    assert [request.output for request in requests] == case.expected


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prompts_beside_decoding_rows_get_the_same_tokens(case: Case, chunk: int) -> None:
    driver = Driver(case.runner(), seed=2)
    requests = [driver.add(prompt) for prompt in case.prompts]
    driver.generate(requests, COUNT, chunk)
    assert [request.output for request in requests] == case.expected


def test_fused_attention_gets_the_same_tokens_as_written_out_scores(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "MAX_SCORES", 0)
    driver = Driver(case.runner(), seed=3)
    requests = [driver.add(prompt) for prompt in case.prompts]
    driver.generate(requests, COUNT, chunk=9)
    assert [request.output for request in requests] == case.expected


def test_many_small_attention_groups_get_the_same_tokens(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "PADDING_ALLOWANCE", 0)
    monkeypatch.setattr(torch_engine, "MAX_GATHERED_BYTES", 2048)
    driver = Driver(llama.runner(), seed=4)
    requests = [driver.add(prompt) for prompt in llama.prompts]
    driver.generate(requests, COUNT, chunk=9)
    assert [request.output for request in requests] == llama.expected


def test_a_prompt_may_fill_the_context_up_to_its_last_token(tmp_path: Path) -> None:
    directory = tiny_gpt2(tmp_path)
    prompts = prompts_of([127, 120], seed=5)
    expected = [
        greedy_of(directory, prompts[:1], 1)[0],
        greedy_of(directory, prompts[1:], 8)[0],
    ]
    driver = Driver(runner_of(directory))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests[:1], 1)
    driver.generate(requests[1:], 8)
    assert [request.output for request in requests] == expected


def test_slots_and_pages_of_ended_requests_serve_others(llama: Case) -> None:
    driver = Driver(runner_of(llama.directory, max_running_requests=2, max_total_tokens=160))
    waiting = list(zip(llama.prompts, llama.expected, strict=True)) * 2
    for first, second in zip(waiting[::2], waiting[1::2], strict=True):
        requests = [driver.add(prompt) for prompt, _ in (first, second)]
        driver.generate(requests, COUNT)
        assert [request.output for request in requests] == [first[1], second[1]]
        for request in requests:
            driver.release(request)


def test_a_request_joins_while_others_decode(llama: Case) -> None:
    driver = Driver(llama.runner())
    early = [driver.add(prompt) for prompt in llama.prompts[:4]]
    driver.generate(early, 3)
    late = [driver.add(prompt) for prompt in llama.prompts[4:]]
    driver.step(*((r, 1) for r in early), *((r, len(r.prompt)) for r in late))
    driver.generate(early + late, COUNT)
    assert [request.output for request in early + late] == llama.expected


def test_decode_plans_need_not_wait_for_the_tokens_of_the_step_before(llama: Case) -> None:
    driver = Driver(llama.runner())
    requests = [driver.add(prompt) for prompt in llama.prompts]
    plans = [driver.plan([(r, len(r.prompt)) for r in requests])]
    plans += [driver.plan([(r, 1) for r in requests]) for _ in range(COUNT - 1)]
    results = [unpack_ids(driver.runner.run(plan).token_ids) for plan in plans]
    assert [list(tokens) for tokens in zip(*results, strict=True)] == llama.expected


def test_a_row_that_does_not_reach_its_last_known_token_samples_nothing(llama: Case) -> None:
    driver = Driver(llama.runner())
    long, short = driver.add(llama.prompts[5]), driver.add(llama.prompts[3])
    assert driver.step((long, 20), (short, 8))[0] == -1
    assert driver.step((long, 12), (short, 1))[0] == -1
    assert driver.step((short, 1), (long, 1))[1] == llama.expected[5][0]
    assert short.output == llama.expected[3][:3]


def test_computed_tokens_of_a_shared_page_are_not_computed_again(llama: Case) -> None:
    driver = Driver(llama.runner())
    prompt, expected = llama.prompts[6], llama.expected[6]
    first = driver.add(prompt)
    driver.step((first, len(prompt)))
    second = driver.add(prompt, like=first, shared=40)
    driver.generate([first, second], COUNT)
    assert first.output == second.output == expected


def test_a_prompt_may_share_what_another_row_of_the_same_step_computes(case: Case) -> None:
    """Three rows with one beginning: each layer's pages are filled before anyone reads them."""
    driver = Driver(case.runner(), seed=5)
    longest, expected = case.prompts[6], case.expected[6]
    first = driver.add(longest)
    second = driver.add(longest, like=first, shared=32)
    third = driver.add(longest, like=second, shared=60)
    driver.step((third, 4), (second, 32), (first, 64))
    driver.generate([first, second, third], COUNT)
    assert first.output == second.output == third.output == expected


@pytest.mark.parametrize("max_scores", [torch_engine.MAX_SCORES, 0])
def test_rows_of_every_kind_in_one_step_get_the_same_tokens_as_alone(
    case: Case, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "MAX_SCORES", max_scores)
    driver = Driver(case.runner(), seed=6)
    prompts, expected = case.prompts, case.expected
    decoding = [driver.add(prompt) for prompt in prompts[:3]]
    driver.generate(decoding, 3)
    chunked = driver.add(prompts[6])
    driver.step((chunked, 24), *((request, 1) for request in decoding))
    fresh = driver.add(prompts[4])
    sharing = driver.add(prompts[6], like=chunked, shared=40)
    rows = [(decoding[0], 1), (fresh, 17), (decoding[1], 1), (sharing, 24), (chunked, 20)]
    driver.step(*rows, (decoding[2], 1))
    everyone = [*decoding, fresh, chunked, sharing]
    driver.generate(everyone, COUNT)
    assert [request.output for request in everyone] == [
        *expected[:3], expected[4], expected[6], expected[6]
    ]  # fmt: skip


def test_a_request_taken_up_again_goes_on_where_it_was(llama: Case) -> None:
    driver = Driver(llama.runner())
    prompt, expected = llama.prompts[4], llama.expected[4]
    request = driver.add(prompt)
    driver.generate([request], 5)
    again = driver.add(prompt + request.output, like=request, shared=16)
    driver.generate([again], COUNT - 5)
    assert request.output + again.output == expected


def test_a_step_that_only_releases_returns_no_tokens(llama: Case) -> None:
    driver = Driver(llama.runner())
    request = driver.add(llama.prompts[0])
    driver.step((request, 1))
    slots = pack_ids([request.slot])
    assert driver.runner.run(plan_of(released=slots)).token_ids == b""
    with pytest.raises(ValueError, match="not all of them held"):
        driver.runner.run(plan_of(slots, pack_ids([1])))


def test_warming_up_leaves_no_trace(llama: Case) -> None:
    runner = llama.runner()
    runner.warm_up()
    assert not runner.table.held
    driver = Driver(runner)
    requests = [driver.add(prompt) for prompt in llama.prompts]
    driver.generate(requests, COUNT)
    assert [request.output for request in requests] == llama.expected


def test_a_result_carries_step_and_times(llama: Case) -> None:
    driver = Driver(llama.runner())
    request = driver.add(llama.prompts[2])
    result = driver.runner.run(driver.plan([(request, 5)]))
    assert result.step == 0
    assert 0 < result.began <= result.ended


def test_a_step_whose_memory_runs_out_is_computed_again_once(
    llama: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(llama.directory, attention_backend="torch")
    forward, failures = runner.engine.forward, [1]

    def short_of_memory(inputs: StepInputs) -> Tensor:
        if failures[0]:
            failures[0] -= 1
            forward(inputs)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    monkeypatch.setattr(runner.engine, "forward", short_of_memory)
    driver = Driver(runner)
    request = driver.add(llama.prompts[3])
    driver.generate([request], COUNT)
    assert request.output == llama.expected[3] and caplog.text.count("computed again") == 1
    failures[0] = 2
    with pytest.raises(ServerFailed, match="start with a lower --mem-fraction-static"):
        driver.step((request, 1))


def test_plans_that_contradict_the_slots_are_refused(llama: Case) -> None:
    driver = Driver(llama.runner())
    request = driver.add([1, 2, 3])
    slot = pack_ids([request.slot])
    driver.step((request, 3))
    with pytest.raises(ValueError, match="runs ahead"):
        driver.runner.run(plan_of(slot, pack_ids([2])))
    with pytest.raises(ValueError, match="two rows for one slot"):
        driver.runner.run(plan_of(slot * 2, pack_ids([1, 1])))
    same_slot = NewSlot(
        slot=request.slot,
        token_ids=pack_ids([1]),
        computed=0,
        pages=pack_ids([0]),
        temperature=0.0,
        top_k=-1,
        top_p=1.0,
        seed=0,
    )
    with pytest.raises(ValueError, match="is held"):
        driver.runner.run(plan_of(new=[same_slot]))


def test_a_row_beyond_the_pages_of_its_slot_is_refused(llama: Case) -> None:
    driver = Driver(llama.runner())
    request = driver.add([1, 2, 3, 4])
    slot, one = pack_ids([request.slot]), pack_ids([1])
    driver.step((request, 4))
    with pytest.raises(ValueError, match=rf"beyond the pages of slots \[{request.slot}\]"):
        driver.runner.run(plan_of(slot, one))
    grown = pack_ids([request.slot, driver.free_pages.pop()])
    assert len(driver.runner.run(plan_of(slot, one, grown=grown)).token_ids) == 4


@pytest.mark.parametrize("name", ["gpt2", "llama_untied"])
def test_bfloat16_mostly_agrees_with_float32(name: str, tmp_path: Path) -> None:
    directory = BUILDERS[name](tmp_path)
    prompts = prompts_of(LENGTHS)
    expected = greedy_of(directory, prompts, 1)
    driver = Driver(runner_of(directory, dtype="bfloat16"))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, COUNT)
    agreeing = sum(r.output[0] == tokens[0] for r, tokens in zip(requests, expected, strict=True))
    assert agreeing >= len(prompts) - 2
    assert all(0 <= token < 512 for request in requests for token in request.output)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_request_with_ids_that_the_model_does_not_have_fails_alone(
    llama: Case, backend: str
) -> None:
    flags = {"attention_backend": backend, "max_running_requests": 10}
    errors = failures_of_unknown_ids(runner_of(llama.directory, **flags))
    rule = "ids of this model are 0 to 511"
    named = [512, -1, 2**31 - 1, 512, 512, 512, 512, 512]
    assert errors == [f"the request holds the token id {wrong}: {rule}" for wrong in named]
