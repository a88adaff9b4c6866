"""The places that list the model families agree."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.models.families.architectures import CONFIGS
from quadriga.server.models.formats.gguf_config import _CONFIGS
from tests.tiny_encoders import ENCODERS
from tests.tiny_experts import EXPERTS
from tests.tiny_models import FAMILIES
from worker_proc.engines.factory import (
    cpu_kernel_flags,
    gpu_kernel_flags,
    why_not_as_stored,
)
from worker_proc.loading.checkpoints import _GGUF_NAMES

DOCS = Path(__file__).resolve().parents[3] / "docs"


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of every row of tables in a section of the page of supported models."""
    section = (DOCS / "supported.md").read_text().partition(f"\n## {heading}\n")[2]
    rows = re.findall(r"^\| (.*) \|$", section.partition("\n## ")[0], re.M)
    return [row.split(" | ") for row in rows]


def test_the_page_of_supported_models_lists_the_registered_families() -> None:
    named = {row[0].strip("`"): row[-1] for row in rows_of("Families")[1:]}
    assert list(named) == list(CONFIGS)
    for family, gguf in named.items():
        if not gguf.startswith("as "):
            assert gguf == ("yes" if family in _CONFIGS else "no"), family


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))])
def test_a_page_that_counts_the_families_has_their_number(page: Path) -> None:
    assert set(re.findall(r"\b(\d+) families", page.read_text())) <= {str(len(CONFIGS))}


@pytest.mark.parametrize(
    ("feature", "args", "cpu_only", "gpu_only"),
    [
        ("`--quantization int8`, `int4`", {"quantization": "int8"}, False, False),
        ("GGUF weights as stored (2 to 8 bits)", {"quantization": "gguf"}, False, False),
        ("`--kv-cache-dtype int8`", {"kv_cache_dtype": "int8"}, True, False),
        ("`--kv-cache-dtype fp8`", {"kv_cache_dtype": "fp8"}, False, True),
    ],
)
def test_the_page_says_which_device_takes_a_flag(
    feature: str, args: dict[str, Any], cpu_only: bool, gpu_only: bool
) -> None:
    worker = WorkerArgs(**args)
    assert (bool(cpu_kernel_flags(worker)), bool(gpu_kernel_flags(worker))) == (cpu_only, gpu_only)
    (row,) = [row for row in rows_of("At a glance") if row[0] == feature]
    assert row[1].startswith("no" if gpu_only else "yes")
    assert row[2].startswith("no" if cpu_only else "yes")


def test_a_quantized_checkpoint_stays_packed_on_both() -> None:
    (row,) = [row for row in rows_of("At a glance") if row[0].startswith("GPTQ, AWQ")]
    assert row[1] == "yes"
    assert row[2].startswith("yes")
    device = torch.device("cpu")
    triton = WorkerArgs(attention_backend="triton")
    assert why_not_as_stored(triton, torch.bfloat16, device) == ""
    assert "float32" in why_not_as_stored(triton, torch.float32, device)
    ranks = WorkerArgs(attention_backend="triton", tp=2)
    assert "--tp" in why_not_as_stored(ranks, torch.bfloat16, device)
    plain = WorkerArgs(attention_backend="torch")
    assert "plain torch" in why_not_as_stored(plain, torch.bfloat16, device)


def test_a_family_of_a_gguf_has_a_config_names_of_tensors_and_an_architecture() -> None:
    # A `llama` with a window is a `mistral`.
    assert _CONFIGS.keys() | {"mistral"} == _GGUF_NAMES.keys()
    assert _CONFIGS.keys() <= CONFIGS.keys()


def test_each_family_is_tested() -> None:
    # A `gemma3` is a `gemma3_text` with images.
    assert CONFIGS.keys() - {"gemma3"} == {*FAMILIES, *EXPERTS, *ENCODERS}
