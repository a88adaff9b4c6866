"""The native kernels multiply the codes of quantized checkpoints, and keep them in few bits."""

from pathlib import Path

import pytest
import torch

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.resolve import resolve_model
from tests.tiny_models import tiny_llama
from tests.unit.quantized_checkpoint import FORMATS, quantize_checkpoint
from tests.unit.worker.compared_engines import (
    CONTEXT,
    NUM_SLOTS,
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    Compared,
    drive,
)
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.weights import pack_coded
from worker_proc.engines.torch_engine import TorchAttention, TorchEngine
from worker_proc.loading.loader import load_model
from worker_proc.models.base import Model
from worker_proc.models.layers import Linear

CPU = torch.device("cpu")
PAGE_SIZE = 16
PAGES = NUM_SLOTS * CONTEXT // PAGE_SIZE
# Formats whose inputs are not rounded to 8 bits.
OF_FLOATS = [name for name in FORMATS if "float" in name or "fp8" in name or "nf4" in name]


def load(directory: Path, packed: bool, dtype: torch.dtype = torch.float32) -> Model:
    files = resolve_model(ModelArgs(model=str(directory)))
    return load_model(files, dtype, CPU, packed)


def compare(directory: Path, dtype: torch.dtype, within: float, seed: int = 10) -> None:
    model = load(directory, packed=False)
    attention = TorchAttention(model.attention_shape, PAGES, PAGE_SIZE, torch.float32, CPU)
    theirs = TorchEngine(model, attention)
    coded = load(directory, packed=True, dtype=dtype)
    with torch.inference_mode():
        ours = NativeEngine(coded, PAGES, PAGE_SIZE, dtype, 1, None, False)
        drive(Compared(ours, theirs, within), dtype, PAGE_SIZE, seed)


def llama(directory: Path, **changes: object) -> Path:
    """Write a model whose groups of 32 fill the rows, and whose last panels are not full."""
    changes = {"intermediate_size": 160, "attention_bias": True, "mlp_bias": True, **changes}
    return tiny_llama(directory, tie=False, **changes)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_steps_have_the_numbers_of_plain_torch(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    quantize_checkpoint(llama(tmp_path), *FORMATS[name])
    within = TOLERANCE[dtype] if name in OF_FLOATS else QUANTIZED_TOLERANCE
    compare(tmp_path, dtype, within)


@pytest.mark.parametrize("name", ["int-quantized, with zeros", "float-quantized, rows"])
def test_rows_and_columns_that_fill_no_group_and_no_panel_are_padded(
    name: str, tmp_path: Path
) -> None:
    quantize_checkpoint(llama(tmp_path, hidden_size=144, head_dim=24, intermediate_size=150),
                        *FORMATS[name])  # fmt: skip
    compare(tmp_path, torch.float32, 1e-5 if name in OF_FLOATS else QUANTIZED_TOLERANCE)


@pytest.mark.parametrize("name", FORMATS)
def test_every_projection_stays_coded_in_about_the_bytes_of_the_file(
    name: str, tmp_path: Path
) -> None:
    quantize_checkpoint(
        llama(tmp_path, hidden_size=768, num_hidden_layers=1, intermediate_size=768,
              num_attention_heads=6, num_key_value_heads=6, head_dim=128),
        *FORMATS[name],
    )  # fmt: skip
    model = load(tmp_path, packed=True)
    coded = [layer for layer in model.modules() if isinstance(layer, Linear) and layer.coded]
    assert len(coded) == 4
    stored = resident = 0
    for layer in coded:
        stored += sum(part.stored_bytes for part in layer.coded)
        panels, _, _ = pack_coded(layer.coded, gated=False)
        resident += panels.numel() * panels.element_size()
    # Double quantization of scales is undone, and a zero takes a byte instead of a half.
    more = {"nf4, double": 1.2, "pack-quantized, groups": 1.06}
    assert 0.93 < resident / stored < more.get(name, 1.05)


def test_a_fused_matrix_with_a_dense_part_is_dequantized_exactly(tmp_path: Path) -> None:
    values = quantize_checkpoint(llama(tmp_path), *FORMATS["awq"], ignore="v_proj")
    model = load(tmp_path, packed=True)
    for name, tensor in model.checkpoint_tensors().items():
        if "self_attn" in name and "o_proj" not in name:
            assert torch.equal(tensor, values[name])
    assert not model.get_submodule("blocks.0.qkv_proj").coded
    assert model.get_submodule("blocks.0.out_proj").coded
    compare(tmp_path, torch.float32, QUANTIZED_TOLERANCE)
