"""What goes into a GPU's quantized products has the values of the file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.formats.quantization import BLOCK_SIZES
from quadriga.server.models.resolve import resolve_model
from tests.tiny_models import tiny_llama
from tests.unit.quantized_checkpoint import FORMATS, quantize_checkpoint
from tests.unit.worker.packed_matrices import random_rows
from worker_proc.gpu.quantized import DoesNotFit, kernel_rows, why_not_gguf
from worker_proc.loading.loader import load_model
from worker_proc.models.layers import Linear

# Of the largest number of a row: one rounding of a scale, and one of a zero, to each dtype.
# Of the tiny model, whose widths are no multiples of 64, or whose codes are places in a table.
UNFIT = [name for name in FORMATS if "nf4" in name or name == "fp8, blocks"]
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_rounded(values: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().amax(1, keepdim=True)
    assert ((values - expected).abs() <= ROUNDING[dtype] * largest).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", [kind for kind in BLOCK_SIZES if not why_not_gguf(kind)])
def test_blocks_of_a_gguf_have_their_values(kind: str, dtype: torch.dtype) -> None:
    rows = random_rows(kind, 40)
    converted = kernel_rows(rows.unpack(), dtype)
    assert_rounded(converted.dense(), rows.dense(), dtype)
    assert converted.num_bytes <= 1.12 * rows.data.numel()


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_SIZES if why_not_gguf(kind)])
def test_a_type_of_gguf_that_does_not_fit_is_named(kind: str) -> None:
    with pytest.raises(DoesNotFit, match=f"^{kind}, whose "):
        kernel_rows(random_rows(kind, 16).unpack(), torch.bfloat16)


def test_a_group_of_equal_values_has_them(kind: str = "Q4_K") -> None:
    rows = random_rows(kind, 4)
    rows.data[:, :2] = 0  # the scale of the first block
    converted = kernel_rows(rows.unpack(), torch.float16)
    assert_rounded(converted.dense(), rows.dense(), torch.float16)
    assert converted.dense()[:, :256].abs().max() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_a_checkpoint_have_their_values(name: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path, tie=False)
    quantize_checkpoint(tmp_path, *FORMATS[name])
    files = resolve_model(ModelArgs(model=str(tmp_path)))
    model = load_model(files, torch.float32, torch.device("cpu"), packed=True)
    found = [rows for m in model.modules() if isinstance(m, Linear) for rows in m.coded]
    assert found
    for rows in found:
        try:
            converted = kernel_rows(rows, torch.float16)
        except DoesNotFit as refusal:
            assert name in UNFIT, refusal
        else:
            assert name not in UNFIT
            assert_rounded(converted.dense(), rows.dense(), torch.float16)
