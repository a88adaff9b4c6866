"""Numbers that overflow: they end their own request, and change no bit of any other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quadriga.errors import NonFiniteLogits
from quadriga.sampling.params import Grammar
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.grammars.grammar import to_library_form
from quadriga.server.models.formats.quantization import BLOCK_SIZES
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import (
    DECODE,
    EXTEND,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
    StepResult,
)
from tests.tiny_experts import tiny_gpt_oss, tiny_mixtral
from tests.tiny_models import (
    let_token_overflow,
    odd_llama,
    tiny_gemma2,
    tiny_llama,
    tiny_mistral,
)
from tests.unit.tiny_vocabulary import tiny_vocabulary
from tests.unit.worker.native_matrices import NativeMatrix
from tests.unit.worker.packed_matrices import random_inputs, random_rows
from tests.unit.worker_driver import Driver, prompts_of
from worker_proc.kv_tiers.pool_pages import HostPool
from worker_proc.sampling.grammar import compile_form
from worker_proc.speculation.ngram import NgramDrafter
from worker_proc.startup.build import make_runner
from worker_proc.step.runner import Runner

BAD = 67
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "odd sizes": odd_llama,
    "window": tiny_mistral,
    "softcap": tiny_gemma2,
    "sinks and experts": tiny_gpt_oss,
    "experts and window": tiny_mixtral,
}
BACKENDS: dict[str, dict[str, Any]] = {
    "float32": {"page_size": 16},
    "float32, pages of 4": {},
    "bfloat16": {"dtype": "bfloat16", "page_size": 32},
    "bfloat16, pages of 4": {"dtype": "bfloat16"},
    "int8 pages": {"page_size": 16, "kv_cache_dtype": "int8"},
    "bfloat16, int8 pages": {"dtype": "bfloat16", "page_size": 16, "kv_cache_dtype": "int8"},
    "torch": {"attention_backend": "torch"},
    "torch, bfloat16": {"attention_backend": "torch", "dtype": "bfloat16", "page_size": 16},
    "transformers": {"model_impl": "transformers"},
}
LENGTHS = [70, 23, 5, 1, 40, 97]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("overflow")
    for name, make in MODELS.items():
        make(root / name)
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="module")
def overflowing(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("overflow")
    made = {}
    for name, make in MODELS.items():
        for part in "vk":
            made[name, part] = root / f"{name} {part}"
            make(made[name, part])
            let_token_overflow(made[name, part], BAD, part=part)
    return made


def runner_of(directory: Path, model_impl: str = "auto", **flags: Any) -> Runner:
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 4,
        "max_total_tokens": 2048,
        "max_running_requests": 8,
    }
    config = ServerConfig().replace(**{**defaults, **flags, "model_impl": model_impl})
    return make_runner(config, resolve_model(ModelArgs(str(directory), model_impl=model_impl)))


def good_prompts() -> list[list[int]]:
    return [[1 if token == BAD else token for token in p] for p in prompts_of(LENGTHS, seed=3)]


def answers(runner: Runner) -> list[list[int]]:
    """Return answers of greedy and drawn requests, some of them in pages of earlier ones."""
    driver = Driver(runner, 2)
    prompts = good_prompts()
    first = [driver.add(p, temperature=i % 2 * 0.8, seed=i) for i, p in enumerate(prompts[:4])]
    driver.generate(first, 9, chunk=11)
    for request in first[:2]:
        driver.release(request)
    second = [driver.add(p) for p in prompts[4:]]
    driver.generate(second, 5)
    runner.table.release_all()
    return [request.output for request in first + second]


def fill_pages(runner: Runner, byte: int) -> None:
    """Fill the pages with NaN (0xFF in every byte), or infinity."""
    for part in runner.engine.kv_parts():
        pages = part[: runner.table.num_pages]
        if byte == 0xFF:
            pages.view(torch.uint8).fill_(byte)
        elif part.is_floating_point():
            pages.fill_(float("inf"))
        else:
            for numbers in runner.engine.kv_numbers():
                numbers[: runner.table.num_pages].fill_(float("inf"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_what_was_in_a_page_before_never_contributes(
    model: str, backend: str, directories: dict[str, Path]
) -> None:
    runner = runner_of(directories[model], **BACKENDS[backend])
    expected = answers(runner)
    for byte in (0xFF, 0):
        fill_pages(runner, byte)
        assert answers(runner) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_context_split_over_threads_reads_nothing_behind_its_end(
    threads: int, tmp_path: Path
) -> None:
    directory = tiny_llama(tmp_path, max_position_embeddings=1024)
    runner = runner_of(directory, page_size=16, max_total_tokens=4096, worker_threads=threads)
    outputs: list[list[list[int]]] = []
    for byte in (None, 0xFF):
        if byte is not None:
            fill_pages(runner, byte)
        driver = Driver(runner)
        requests = [driver.add([1 + n % 60 for n in range(length)]) for length in (700, 513)]
        driver.generate(requests, 6, chunk=200)
        outputs.append([request.output for request in requests])
        runner.table.release_all()
    assert outputs[0] == outputs[1]


def failures(result: StepResult) -> list[tuple[int, str]]:
    return [(row.row, row.code) for row in result.failed]


@pytest.mark.parametrize("part", ["v", "k"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_request_that_overflows_ends_and_the_others_go_on_unchanged(
    model: str, backend: str, part: str, overflowing: dict[tuple[str, str], Path]
) -> None:
    runner = runner_of(overflowing[model, part], **BACKENDS[backend])
    alone = answers(runner)
    driver = Driver(runner, 2)
    bad = driver.add([BAD] * 20)
    good = driver.add(good_prompts()[0])
    result = runner.run(driver.plan([(bad, 20), (good, 70)]))
    bad_token, token = unpack_ids(result.token_ids)
    assert failures(result) == [(0, NonFiniteLogits.code)]
    assert "logits for token 20 of the request" in result.failed[0].error
    assert [(row.row, row.position) for row in result.nonfinite] == [(0, 0)]
    assert (bad_token, token) == (-1, alone[0][0])
    result = runner.run(driver.plan([(bad, 1), (good, 1)]))  # it was planned before the result
    assert failures(result) == [(0, NonFiniteLogits.code)]
    assert unpack_ids(result.token_ids)[1] == alone[0][1]
    runner.table.release_all()
    assert answers(runner) == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_with_numbers_that_overflow_is_reported_from_its_first_bad_token(
    backend: str, overflowing: dict[tuple[str, str], Path]
) -> None:
    runner = runner_of(overflowing["llama", "v"], **BACKENDS[backend])
    driver = Driver(runner)
    request = driver.add([*good_prompts()[0][:40], BAD, *good_prompts()[4]])
    first = runner.run(driver.plan([(request, 40)]))
    assert (first.failed, first.nonfinite) == ([], [])
    second = runner.run(driver.plan([(request, 20)]))
    assert second.failed == []
    (row,) = second.nonfinite
    assert row.position == 40
    third = runner.run(driver.plan([(request, 21)]))
    assert failures(third) == [(0, NonFiniteLogits.code)]
    pages = HostPool(runner.engine.kv_parts(), runner.engine.kv_numbers())
    full = 40 // runner.table.page_size
    assert [pages.is_finite(page) for page in request.pages[:full]] == [True] * full
    assert not pages.is_finite(request.pages[40 // runner.table.page_size])


def new_slot(
    slot: int, prompt: list[int], rules: SlotSamplingParams | None, temperature: float, size: int
) -> NewSlot:
    pages = range(slot * 128 // size, (slot + 1) * 128 // size)
    return NewSlot(slot, pack_ids(prompt), 0, pack_ids(pages), temperature, -1, 0.9, slot, rules)


KINDS: dict[str, SlotSamplingParams | None] = {
    "plain": None,
    "logprobs": SlotSamplingParams(3, logprobs=2),
    "bias and bad words": SlotSamplingParams(
        3, bias_ids=pack_ids([4]), bias=np.float32(3).tobytes(), bad_words=[pack_ids([9])]
    ),
    "allowed": SlotSamplingParams(3, allowed_ids=pack_ids([7, 8, 9])),
    "penalties": SlotSamplingParams(3, repetition_penalty=1.3, presence_penalty=0.5),
    "min_p": SlotSamplingParams(3, min_p=0.1),
    "grammar": SlotSamplingParams(3, grammar=b"key", stop_ids=pack_ids([0]), jumps=True),
    "prompt logprobs": SlotSamplingParams(3, prompt_logprobs=1),
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("backend", ["float32", "bfloat16", "torch", "transformers"])
def test_every_kind_of_row_ends_with_the_same_error_beside_rows_that_do_not(
    backend: str, temperature: float, overflowing: dict[tuple[str, str], Path], llama_dir: Path
) -> None:
    runner = runner_of(overflowing["llama", "v"], **BACKENDS[backend])
    vocabulary = tiny_vocabulary(llama_dir, 512)
    form = GrammarForm.of(to_library_form(Grammar("regex", "[ab]{9}"), vocabulary), None)
    runner.table.sampling.compiled = {b"key": compile_form(vocabulary, form)}
    size = runner.table.page_size
    for kind, rules in KINDS.items():
        good = [new_slot(0, [3, 4, 5], rules, temperature, size)]
        plan = StepPlan(0, EXTEND, pack_ids([0]), pack_ids([3]), good, b"")
        alone = runner.run(plan)
        assert alone.failed == [], kind
        runner.table.release_all()
        both = [*good, new_slot(1, [BAD] * 3, rules, temperature, size)]
        result = runner.run(StepPlan(0, EXTEND, pack_ids([0, 1]), pack_ids([3, 3]), both, b""))
        assert failures(result)[:1] == [(1, NonFiniteLogits.code)], kind
        assert len(result.failed) == 1, kind
        assert unpack_ids(result.token_ids)[0] == unpack_ids(alone.token_ids)[0], kind
        assert result.forced == alone.forced, kind
        runner.table.release_all()


def test_minus_infinity_is_no_error_where_a_number_is_left(tmp_path: Path) -> None:
    directory = odd_llama(tmp_path)
    weights = load_file(directory / "model.safetensors")
    for fraction, is_error in ((0.5, False), (1.0, True)):
        weights["lm_head.weight"][: int(517 * fraction)] = float("-inf")
        weights["lm_head.weight"][: int(517 * fraction), 1:] = 0
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        for backend in ("float32", "torch"):
            runner = runner_of(directory, **BACKENDS[backend])
            driver = Driver(runner)
            requests = [driver.add(p, temperature=i % 2) for i, p in enumerate(good_prompts()[:4])]
            result = runner.run(driver.plan([(r, len(r.prompt)) for r in requests]))
            signs = [token >= 0 for token in unpack_ids(result.token_ids)]
            if is_error:
                assert not all(signs)
                assert len(result.failed) == signs.count(False)


class BadDrafter(NgramDrafter):
    """Drafts a token whose numbers overflow, and right ones before it."""

    def __init__(self, runner: Runner, answers: dict[int, list[int]]) -> None:
        super().__init__(runner.table)
        self.answers = answers

    def _draft_slot(self, slot: int, most: int) -> list[int]:
        known = int(self._table.num_known[slot])
        right = self.answers[slot][known : known + known % 3]
        return self._table.sampling.follow_drafts(slot, [*right, BAD, BAD][:most])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["llama", "window", "sinks and experts"])
def test_a_wrong_draft_that_overflows_changes_nothing(
    model: str, backend: str, overflowing: dict[tuple[str, str], Path]
) -> None:
    runner = runner_of(overflowing[model, "v"], **BACKENDS[backend])
    prompts, size = good_prompts()[1:4], runner.table.page_size
    outputs: list[list[list[int]]] = []
    for drafts in (False, True):
        tokens = [list(prompt) for prompt in prompts]
        runner.drafter = BadDrafter(runner, dict(enumerate(outputs[0]))) if drafts else None
        slots = list(range(len(prompts)))
        never = SlotSamplingParams(  # a drawn token could be the bad one
            20, bias_ids=pack_ids([BAD]), bias=np.float32(-100).tobytes()
        )
        rules = [None, never, None]
        new = [new_slot(slot, prompts[slot], rules[slot], slot % 2 * 0.8, size) for slot in slots]
        counts = [len(prompt) for prompt in prompts]
        plan = StepPlan(0, EXTEND, pack_ids(slots), pack_ids(counts), new, b"")
        while min(map(len, tokens)) < 32:
            result = runner.run(plan)
            assert (result.failed, result.nonfinite) == ([], [])
            for slot, token in enumerate(unpack_ids(result.token_ids)):
                tokens[slot].append(token)
            for row in result.guessed:
                tokens[row.row] += unpack_ids(row.token_ids)
            ones, most = pack_ids([1] * len(slots)), pack_ids([4] * len(slots))
            plan = StepPlan(
                1, DECODE, pack_ids(slots), ones, [], b"", num_guesses=most if drafts else b""
            )
        outputs.append([of_slot[:32] for of_slot in tokens])
        runner.table.release_all()
    runner.drafter = None
    assert outputs[1] == outputs[0]


@pytest.mark.parametrize("backend", ["float32", "bfloat16", "int8 pages", "torch"])
def test_a_request_ends_where_its_own_answer_overflows_among_drafts(
    backend: str, overflowing: dict[tuple[str, str], Path]
) -> None:
    """The first sample fails, with drafts behind it."""
    runner = runner_of(overflowing["llama", "v"], **BACKENDS[backend])
    size = runner.table.page_size
    new = [new_slot(0, [3, 4, 5], None, 0.0, size), new_slot(1, [3, 4, BAD], None, 0.0, size)]
    alone = runner.run(StepPlan(0, EXTEND, pack_ids([0]), pack_ids([3]), new[:1], b""))
    runner.table.release_all()
    runner.drafter = BadDrafter(runner, {0: [0] * 9, 1: [0] * 9})
    plan = StepPlan(
        0, EXTEND, pack_ids([0, 1]), pack_ids([3, 3]), new, b"", num_guesses=pack_ids([2, 2])
    )
    result = runner.run(plan)
    assert failures(result) == [(1, NonFiniteLogits.code)]
    assert list(unpack_ids(result.token_ids)) == [*unpack_ids(alone.token_ids), -1]


def test_the_kernels_of_each_format_keep_nan_in_its_own_row() -> None:
    """Codes of 8 bits have no NaN, and activations that compare lose it."""
    for name in BLOCK_SIZES:
        matrix = NativeMatrix([random_rows(name, 33)])
        inputs = random_inputs(4)
        clean = matrix.multiply(inputs)[:, :33]
        for value in (float("nan"), float("inf")):
            broken = inputs.clone()
            broken[2, 77] = value
            out = matrix.multiply(broken)[:, :33]
            assert not out[2].isfinite().any(), name
            assert out[[0, 1, 3]].equal(clean[[0, 1, 3]]), name
