"""What goes between host and GPU: few copies, none of which the host waits for.

Torch's device `meta` stands for the GPU: its tensors have no values, and a question for one fails.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import (
    EXTEND,
    NewSlot,
    SlotSamplingParams,
    StepPlan,
    WantedLogprobs,
)
from tests.unit.worker_driver import runner_of
from worker_proc.models import transfer
from worker_proc.models.transfer import DeviceToHostCopier, send_all
from worker_proc.sampling import logits_processors
from worker_proc.sampling.grammar import (
    Constrained,
    SlotConstraint,
    mask_by_grammar,
    mask_packed,
)
from worker_proc.sampling.logits_processors import RowLogits, SlotLogits, apply_logits_processors
from worker_proc.step import outputs
from worker_proc.step.outputs import row_logprobs, sampled_logprobs
from worker_proc.step.slot_table import SlotTable

META = torch.device("meta")
VOCAB_SIZE = 100
EVERY_RULE = SlotSamplingParams(
    num_prompt=2,
    min_p=0.1,
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    bias_ids=pack_ids([4, 5]),
    bias=np.array([1, 2], dtype="<f4").tobytes(),
    allowed_ids=pack_ids([4, 5, 6]),
    bad_words=[pack_ids([3, 4]), pack_ids([6])],
    stop_ids=pack_ids([1]),
    min_new_tokens=9,
    logprobs=WantedLogprobs(3, pack_ids([7, 8])),
)


class FixedConstraint(SlotConstraint):
    """Allows the same tokens at every step."""

    def __init__(self, allowed: npt.NDArray[np.uint8]) -> None:
        self._allowed = allowed

    @property
    def matcher(self) -> None:
        return None

    def adjust(self, mask: npt.NDArray[np.uint8]) -> None:
        mask[:] = self._allowed

    def advance(self, token: int) -> str:
        return ""

    def take_forced(self, max_tokens: int) -> list[int]:
        return []

    def copy(self) -> "FixedConstraint":
        return self

    def ends_with(self, token: int) -> bool:
        return False


def mask_of(seed: int) -> npt.NDArray[np.uint8]:
    num_bytes = -(-VOCAB_SIZE // 32) * 4
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


class WaitingCopies(TorchDispatchMode):
    """Notes the operations that copy numbers from the host to the stand-in of a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.__name__.split(".")[0]
        is_new = name == "lift_fresh" and args[0].dim() > 0  # torch.tensor with a device
        sources = [one for one in args if isinstance(one, Tensor) and one.device.type == "cpu"]
        is_copy = name in ("_to_copy", "copy_") and any(one.dim() for one in sources)
        if isinstance(out, Tensor) and out.device == META and (is_new or is_copy):
            self.names.append(name)
        return out


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let `send` copy nothing, and note the shapes that it was called with."""
    shapes: list[tuple[int, ...]] = []

    def send(values: npt.NDArray[Any], device: torch.device) -> Tensor:
        shapes.append(values.shape)
        return torch.empty(values.shape, dtype=transfer.torch_dtype(values), device=device)

    for module in (transfer, logits_processors, outputs):
        monkeypatch.setattr(module, "send", send)
    return shapes


class WatchedCopier(DeviceToHostCopier):
    """Notes how many copies were begun, and how many were waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_begun = self.num_fetched = 0

    def begin_all(self, *arrays: transfer.TokenIds) -> Callable[[], list[npt.NDArray[Any]]]:
        self.num_begun += 1
        fetch = super().begin_all(*arrays)

        def watched() -> list[npt.NDArray[Any]]:
            self.num_fetched += 1
            return fetch()

        return watched


def test_arrays_of_several_types_are_copied_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[npt.NDArray[Any]] = []

    def send(values: npt.NDArray[Any], device: torch.device) -> Tensor:
        copies.append(values)
        return torch.from_numpy(values)

    monkeypatch.setattr(transfer, "send", send)
    arrays = [
        np.array([[1, -2, 3], [4, 5, 2**40]]),
        np.array([0.5, -1.25, 3.0], dtype=np.float32),
        np.array([True, False, True]),
        np.empty(0, dtype=np.int32),
        np.array([7], dtype=np.int32),
    ]
    received = send_all(cast(torch.device, SimpleNamespace(type="gpu")), *arrays)
    assert len(copies) == 1
    for array, tensor in zip(arrays, received, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


def test_an_admission_is_two_copies_and_growth_is_one(sent: list[tuple[int, ...]]) -> None:
    table = SlotTable(8, 64, 30, 4, META)
    new = [
        NewSlot(slot, pack_ids([1] * 6), 0, pack_ids([slot, slot + 9]), 0.5, 5, 0.9, slot)
        for slot in range(3)
    ]
    with WaitingCopies() as waiting:
        table.admit(new)
        assert len(sent) == 2
        table.grow(np.array([0, 2, 2]), np.array([20, 21, 22]))
    assert len(sent) == 3
    assert waiting.names == []


def test_the_host_waits_for_no_copy_of_a_row_with_penalties_masks_and_logprobs(
    sent: list[tuple[int, ...]],
) -> None:
    with WaitingCopies() as waiting:
        slot = SlotLogits(EVERY_RULE, META, FixedConstraint(mask_of(0)))
        rows = [RowLogits(row, row, slot, slot.grammar) for row in (0, 2)]
        logits = torch.empty(3, VOCAB_SIZE, device=META)
        tokens = torch.empty(3, 20, dtype=torch.int32, device=META)
        asked = row_logprobs(logits, rows)
        assert asked is not None
        scores = apply_logits_processors(logits, rows, np.array([7, 8, 9]), tokens)
        copier = cast(DeviceToHostCopier, SimpleNamespace(begin=lambda values: values))
        sampled_logprobs(asked, scores.argmax(-1), np.arange(3), copier)
    assert waiting.names == []
    assert sent


def test_bits_of_a_grammar_mask_on_a_device_as_on_the_host() -> None:
    scores = torch.randn(4, VOCAB_SIZE)
    expected, masks = scores.clone(), np.stack([mask_of(seed) for seed in (1, 2)])
    first, second = map(FixedConstraint, masks)
    mask_by_grammar(expected, [Constrained(3, first), Constrained(1, second)])
    mask_packed(scores, torch.tensor([3, 1]), torch.from_numpy(masks))
    assert scores.isinf().any()
    assert scores.equal(expected)


@pytest.mark.parametrize("asked", ["sampled", "prompt"])
def test_the_next_step_need_not_wait_for_logprobs(asked: str, llama_dir: Path) -> None:
    runner = runner_of(llama_dir, attention_backend="torch")
    rules = SlotSamplingParams(
        num_prompt=5,
        logprobs=2 if asked == "sampled" else None,
        prompt_logprobs=2 if asked == "prompt" else None,
    )
    slot = NewSlot(1, pack_ids([3, 4, 5, 6, 7]), 0, pack_ids([0, 1]), 0.0, -1, 1.0, 0, rules)
    copier = runner.table.copier = WatchedCopier()
    with torch.inference_mode():
        finish = runner.launch(StepPlan(0, EXTEND, pack_ids([1]), pack_ids([5]), [slot], b""))
    assert (copier.num_begun, copier.num_fetched) == (2, 0)
    result = finish()
    assert copier.num_fetched == 2
    assert bool(result.logprobs) == (asked == "sampled")
    assert bool(result.prompt_logprobs) == (asked == "prompt")
