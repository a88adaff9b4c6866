"""Adapters on a GPU against plain torch: the kernels, whole models, and graphs of decode steps."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quadriga.errors import ModelError
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.worker import NO_ADAPTER
from tests.tiny_experts import EXPERTS, tiny_gpt_oss, tiny_mixtral
from tests.tiny_models import tiny_gpt2, tiny_llama
from tests.unit.gguf_checkpoint import gguf_of

from tests.triton_device import DEVICE, needs_float32_codes  # isort: skip (it comes first)

from tests.adapted_runs import Answer, run_adapted
from tests.unit.gpu.graphs import GRAPH_SIZES, SMALL, capture
from tests.unit.worker.random_adapters import random_adapter
from tests.unit.worker_driver import Driver, load_on_cpu, prompts_of, runner_of
from worker_proc.adapters.change import Adapter, AdapterLimits
from worker_proc.engines.torch_engine import TorchAdapters, TorchOps
from worker_proc.gpu import adapters as gpu_adapters
from worker_proc.gpu.adapters import (
    DeviceAdapter,
    GPUAdapters,
    HostAdapter,
    group_rows,
    num_blocks_of,
)
from worker_proc.gpu.engine import TritonEngine
from worker_proc.gpu.kernels import adapters as kernels
from worker_proc.gpu.kernels.adapters import BLOCK_ROWS, group_pairs
from worker_proc.gpu.kernels.experts import route_pairs
from worker_proc.models.decoder import Decoder
from worker_proc.models.layers import Experts, Linear
from worker_proc.startup import build
from worker_proc.startup.build import make_runner
from worker_proc.step.runner import Runner

TRITON: dict[str, Any] = {
    "device": str(DEVICE),
    "attention_backend": "triton",
    "max_total_tokens": 512,
    "enable_lora": True,
    "max_loras": 4,
    "max_lora_rank": 40,
}
LIMITS = AdapterLimits(4, 40)


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the inputs of D over fewer programs, each of which the interpreter takes long for."""
    monkeypatch.setattr(kernels, "NUM_SPLITS", 2)


def decoder(directory: Path) -> Decoder:
    return cast(Decoder, load_on_cpu(directory))


def adapters_of(model: Decoder) -> list[Adapter]:
    """Ranks below and above a block of the kernels, and every kind of change."""
    has_biases = any(one.down[0].bias is not None for one in model.modules()
                     if isinstance(one, Experts))  # fmt: skip
    return [
        random_adapter(model, 4, seed=1, experts=True),
        random_adapter(model, 24, seed=2, gain=True, shift=True, experts=not has_biases),
        random_adapter(model, 8, seed=3, wanted=lambda name: "mlp" in name, head=True),
        random_adapter(model, 40, seed=4, shift=True, embedding=True, experts=True),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_of_several_adapters_equal_those_of_plain_torch(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = decoder(tiny_gpt2(tmp_path, n_layer=1, n_embd=144, n_head=6))
    adapters = adapters_of(model)
    model.to(dtype)
    ours, theirs = GPUAdapters(model, LIMITS, dtype, DEVICE), TorchAdapters(model, DEVICE)
    for index, adapter in enumerate(adapters):
        ours.set_adapter(index, adapter)
        theirs.set_adapter(index, adapter)
    indexes = np.random.default_rng(0).integers(NO_ADAPTER, 4, 75)
    indexes[:20] = 1  # more than a block has rows
    reference = TorchOps({}, adapted=theirs.of_rows(indexes))
    rows = ours.of_rows(indexes)
    generator = torch.Generator().manual_seed(0)
    for matrix in model.to(DEVICE).matrices():
        outputs, inputs = matrix.weight.shape
        x = torch.randn(75, inputs, generator=generator).to(DEVICE, dtype)
        bias = matrix.bias if isinstance(matrix, Linear) else None
        before = torch.nn.functional.linear(x, matrix.weight, bias)
        expected = reference._adapt(matrix, x, before.clone())
        results = []
        for is_split in (True, False):
            padded = torch.empty(75, outputs + 5, device=DEVICE, dtype=dtype)
            y = padded[:, :outputs].copy_(before)
            ours.of_groups(rows.groups, is_split).adapt(matrix, x, y, bias)
            results.append(y)
        assert torch.equal(*results)
        assert torch.equal(y[indexes == NO_ADAPTER], before[indexes == NO_ADAPTER])
        error = (y.float() - expected.float()).norm() / expected.float().norm()
        assert error <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_blocks_have_rows_of_one_adapter() -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        count = int(draw.integers(1, 90))
        adapters = draw.integers(NO_ADAPTER, 5, count)
        bound = num_blocks_of(count, 5)
        order, blocks = group_rows(adapters, bound)
        assert len(blocks) == bound
        found = np.full(count, NO_ADAPTER)
        for index, expert, first, size in blocks[blocks[:, 0] != NO_ADAPTER]:
            assert expert == 0
            assert 0 < size <= BLOCK_ROWS
            found[order[first : first + size]] = index
        assert found.tolist() == adapters.tolist()
        exact = group_rows(adapters)[1]
        assert (exact[:, 0] != NO_ADAPTER).all()
        assert (exact == blocks[: len(exact)]).all()


@pytest.mark.parametrize(
    ("tokens", "num_experts", "num_chosen"), [(1, 5, 2), (90, 8, 3), (300, 4, 1)]
)
def test_blocks_of_pairs_have_rows_of_one_adapter_and_expert(
    tokens: int, num_experts: int, num_chosen: int
) -> None:
    draw = np.random.default_rng(tokens)
    adapters = draw.integers(NO_ADAPTER, 4, tokens)
    adapters[: tokens // 3] = 2
    order, _ = group_rows(adapters)
    scores = torch.from_numpy(draw.random((tokens, num_experts), dtype=np.float32)).to(DEVICE)
    indexes, tokens_in_order = (torch.from_numpy(v).to(DEVICE) for v in (adapters, order))
    routing = route_pairs(scores, num_chosen, True, tokens_in_order)
    assert routing.pairs.sort().values.tolist() == list(range(tokens * num_chosen))
    assert routing.places.flatten()[routing.pairs.long()].tolist() == list(
        range(len(routing.pairs))
    )
    groups = group_pairs(routing.pairs, routing.chosen, indexes, num_experts, 4)
    of_pair = [(adapters[pair // num_chosen], routing.chosen.flatten()[pair].item())
               for pair in routing.pairs.tolist()]  # fmt: skip
    found: list[int] = []
    for index, expert, first, size in groups.blocks.tolist():
        if index != NO_ADAPTER:
            assert 0 < size <= BLOCK_ROWS
            assert set(of_pair[first : first + size]) == {(index, expert)}
            found += range(first, first + size)
    expected = [place for place, (index, _) in enumerate(of_pair) if index != NO_ADAPTER]
    assert sorted(found) == expected


def triton_runner(directory: Path, adapters: Sequence[Adapter], **flags: Any) -> Runner:
    runner = runner_of(directory, **{**TRITON, **flags})
    for index, adapter in enumerate(adapters):
        runner.engine.set_adapter(index, runner.engine.pack_adapter(adapter))
    return runner


def requests_of(count: int) -> list[tuple[list[int], int]]:
    """A prompt for each adapter and two for the base."""
    prompts = prompts_of([3, 18, 2, 9, 7, 4][: count + 2])
    return list(zip(prompts, [*range(count), NO_ADAPTER, NO_ADAPTER], strict=True))


def check_equal(ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize("family", ["llama", "tied llama", "gpt2", *EXPERTS])
def test_answers_equal_those_of_plain_torch(family: str, tmp_path: Path) -> None:
    """Prompts in chunks beside rows that decode, of the base and of all adapters."""
    changes = {**SMALL, "tie_word_embeddings": family.startswith("tied")}
    make = {
        "gpt2": partial(tiny_gpt2, n_layer=1, n_head=2),
        **{name: partial(tiny, num_hidden_layers=1) for name, tiny in EXPERTS.items()},
    }.get(family, partial(tiny_llama, **changes))
    directory = make(tmp_path)
    adapters, requests = adapters_of(decoder(directory)), requests_of(4)
    torch_runner = runner_of(directory, attention_backend="torch")
    for index, adapter in enumerate(adapters):
        torch_runner.engine.set_adapter(index, adapter)
    expected = run_adapted(torch_runner, requests, 4)
    check_equal(run_adapted(triton_runner(directory, adapters), requests, 4), expected)


def small(family: str, directory: Path) -> Path:
    if family == "mixtral":
        return tiny_mixtral(directory, num_hidden_layers=1)
    return tiny_llama(directory, **SMALL)


def graph_runner(directory: Path, max_loras: int = 4) -> Runner:
    """Return a runner with graphs of decode steps."""
    plain = runner_of(directory, **TRITON, disable_cuda_graph=True)
    engine = TritonEngine(
        cast(TritonEngine, plain.engine).model, plain.table.num_pages, plain.table.page_size,
        plain.dtype, DEVICE, graph_sizes=[*GRAPH_SIZES, 8], capture=capture(), prompt_sizes=[8],
        adapters=AdapterLimits(max_loras, 40),
    )  # fmt: skip
    engine.capture_graphs(plain.table)
    return Runner(engine, plain.table, plain.dtype)


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_graphs_of_decode_steps_compute_adapters_that_come_and_go(
    family: str, tmp_path: Path
) -> None:
    directory = small(family, tmp_path)
    adapters, requests = adapters_of(decoder(directory)), requests_of(4)
    runner, reference = graph_runner(directory), runner_of(directory, attention_backend="torch")
    engine = cast(TritonEngine, runner.engine)
    graphs = engine._adapted_graphs
    assert graphs is not None
    for turn in (adapters, adapters[::-1]):
        for index, adapter in enumerate(turn):
            engine.set_adapter(index, None)
            for one in (engine, reference.engine):
                one.set_adapter(index, adapter)
        for some in (requests[2:], requests[:1], requests[-1:]):
            graphs.last_replay = None
            check_equal(run_adapted(runner, some, 3), run_adapted(reference, some, 3))
            assert (graphs.last_replay is not None) == (some[0][1] != NO_ADAPTER)
    engine.set_adapter(0, None)
    with pytest.raises(ValueError, match="a row has the adapter 0, which is not loaded"):
        run_adapted(runner, requests[:1], 2)


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_only_rows_that_sample_are_changed_after_the_last_attention(
    family: str, tmp_path: Path
) -> None:
    """Prompts whose ends sample beside others that do not, without log-probabilities."""
    directory = small(family, tmp_path)
    adapters = adapters_of(decoder(directory))
    outputs = []
    for engine in ("torch", "triton"):
        runner = runner_of(directory, **{**TRITON, "attention_backend": engine})
        for index, adapter in enumerate(adapters):
            runner.engine.set_adapter(index, adapter)
        driver = Driver(runner)
        requests = [driver.add(prompt) for prompt, _ in requests_of(4)]
        for request, (_, index) in zip(requests, requests_of(4), strict=True):
            driver.set_adapter(request, index)
        driver.generate(requests, 3, chunk=6)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


@needs_float32_codes
def test_quantized_weights_get_the_product_in_the_compute_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path, tie=False, attention_bias=True, num_hidden_layers=1)
    adapters, requests = adapters_of(decoder(model)), requests_of(4)
    files = gguf_of(model, lambda _: Kind.Q8_0)
    flags = {"dtype": "float32", "page_size": 4, "max_running_requests": 8}
    config = ServerConfig().replace(**flags, max_total_tokens=512)
    plain = {"device": "cpu", "attention_backend": "torch", "quantization": "none"}
    reference = make_runner(config.replace(**plain), files)
    for index, adapter in enumerate(adapters):
        reference.engine.set_adapter(index, adapter)
    expected = run_adapted(reference, requests, 3)
    monkeypatch.setattr(build, "choose_quantization", lambda *_: "gguf")
    runner = make_runner(config.replace(**TRITON), files)
    for index, adapter in enumerate(adapters):
        runner.engine.set_adapter(index, adapter)
    linears = [m for m in cast(TritonEngine, runner.engine).model.modules()
               if isinstance(m, Linear)]  # fmt: skip
    assert all(linear.product is not None for linear in linears)
    check_equal(run_adapted(runner, requests, 3), expected)


def test_the_largest_step_that_is_measured_has_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny_llama(tmp_path, **SMALL), **TRITON)
    adapters: list[int] = []

    def peak(run: Callable[[], object], _: torch.device) -> int:
        run()
        adapters.extend(runner.table.adapters[runner.table.num_computed > 0].tolist())
        return 0

    monkeypatch.setattr(build, "peak_gpu_bytes", peak)
    monkeypatch.setattr(build, "GPU_PREFILL_TOKENS", 16)
    flags = {"max_batch_size": 2, "max_running_requests": 8, "page_size": 4, "enable_lora": True}
    build._measure_step(ServerConfig().replace(**flags), 32, lambda _: runner)
    assert 0 in adapters  # a GPU measures its graphs of the base, too


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize(
    ("family", "others"), [("llama", [[1], [4], [3, 0]]), ("mixtral", [[4], [3, 0]])]
)
def test_deterministic_bits_depend_on_no_other_adapter(
    family: str, others: list[list[int]], tmp_path: Path
) -> None:
    """Neither those of rows with adapters nor those of the base."""
    directory = small(family, tmp_path)
    adapters, requests = adapters_of(decoder(directory)), requests_of(4)
    flags = {"enable_deterministic_inference": True}
    runner = triton_runner(directory, adapters, **flags)
    together = run_adapted(runner, requests, 2)
    for some in others:
        apart = run_adapted(runner, [requests[number] for number in some], 2, chunk=30)
        for number, alone in zip(some, apart, strict=True):
            assert alone.token_ids == together[number].token_ids
            assert (alone.logprobs == together[number].logprobs).all()


def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(tiny_gpt_oss(tmp_path, num_hidden_layers=1))
    adapters = GPUAdapters(model, LIMITS, torch.float32, DEVICE)
    with pytest.raises(ModelError, match=r"scales the results of experts that have biases"):
        adapters.pack(random_adapter(model, 4, seed=0, gain=True, experts=True))
    one = random_adapter(model, 200, seed=0)
    with pytest.raises(ModelError, match="start with a larger --max-lora-rank"):
        adapters.pack(one)

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_adapters, "_to_device", run_out)
    with pytest.raises(ModelError, match=r"more than is free on .*lower --mem-fraction-static"):
        adapters.upload(adapters.pack(random_adapter(model, 4, seed=0)))


def test_a_packed_adapter_stays_in_host_memory_and_is_uploaded_as_often_as_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
        return memory.to(device, copy=True)  # also where the device is a CPU

    monkeypatch.setattr(gpu_adapters, "_to_device", copied)
    directory = tiny_llama(tmp_path, **SMALL)
    runner, requests = runner_of(directory, **TRITON), requests_of(1)
    engine = runner.engine
    packed = engine.pack_adapter(adapters_of(decoder(directory))[0])
    assert isinstance(packed, HostAdapter)
    before = packed.fields.copy(), packed.memory.clone()
    answers = []
    for _ in range(2):
        uploaded = engine.upload_adapter(packed)
        assert isinstance(uploaded, DeviceAdapter) and uploaded.num_bytes == packed.num_bytes
        engine.set_adapter(0, uploaded)
        answers.append(run_adapted(runner, requests, 3))
        engine.set_adapter(0, None)
        with torch.inference_mode():  # as where the device's memory is used for something else
            uploaded.memory.zero_()
    check_equal(*answers)
    assert (packed.fields == before[0]).all() and torch.equal(packed.memory, before[1])


def test_an_engine_without_adapters_is_as_it_was(tmp_path: Path) -> None:
    runner = runner_of(tiny_llama(tmp_path, **SMALL), **{**TRITON, "enable_lora": False})
    assert runner.places is None
    with pytest.raises(ModelError, match="start with --enable-lora, --lora-modules or --lora-dir"):
        runner.engine.set_adapter(0, None)
    with pytest.raises(ValueError, match="a row has the adapter 0, and the engine takes none"):
        run_adapted(runner, requests_of(4)[:1], 1)
