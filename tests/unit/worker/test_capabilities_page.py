"""The yes and no of docs/supported.md are those of the code, and docs/coming-from.md agrees."""

import re

import pytest

from quadriga.server.config.engine_args import WorkerArgs
from tests.users_book import DOCS
from worker_proc.engines.factory import cpu_kernel_flags, gpu_kernel_flags

# Rows of docs/supported.md with a flag, and what the worker's flags are with it.
FLAGS = {
    "`--quantization int8`, `int4`": (
        WorkerArgs(quantization="int8"),
        WorkerArgs(quantization="int4"),
    ),
    "`--kv-cache-dtype int8`": (WorkerArgs(kv_cache_dtype="int8"),),
    "`--kv-cache-dtype fp8`": (WorkerArgs(kv_cache_dtype="fp8"),),
}
# Begin of a row of docs/supported.md -> begin of the row of docs/coming-from.md about the same.
SAME = {
    "mixtures of experts": "mixtures of experts",
    "GGUF weights as stored": "GGUF, as stored",
    "GPTQ, AWQ": "GPTQ, AWQ",
    "KV cache on disk": "KV cache on disk",
}
ON_CPUS_ONLY = re.compile(r"\bon (?:a CPU|CPUs)\b")


def rows(page: str) -> dict[str, list[str]]:
    """Return the rows of a page's tables: the first cell, and the others."""
    found = {}
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("| "):
            first, *others = [cell.strip() for cell in line.strip("|").split(" | ")]
            found[first.strip()] = others
    return found


def row(page: str, begin: str) -> list[str]:
    """Return the only row that begins with a text."""
    (cells,) = (cells for first, cells in rows(page).items() if first.startswith(begin))
    return cells


def says_yes(cell: str) -> bool:
    """Return whether a cell of docs/supported.md says that something works."""
    assert re.match(r"yes|no|always|on by default|for tests|`--", cell), cell
    return not cell.startswith("no")


@pytest.mark.parametrize(("name", "variants"), FLAGS.items())
def test_a_flag_works_where_the_engines_take_it(
    name: str, variants: tuple[WorkerArgs, ...]
) -> None:
    cpu, cuda = row("supported.md", name)[:2]
    for args in variants:
        assert says_yes(cpu) == (not gpu_kernel_flags(args))
        assert says_yes(cuda) == (not cpu_kernel_flags(args))


@pytest.mark.parametrize(("supported", "compared"), SAME.items())
def test_the_comparison_does_not_contradict_it(supported: str, compared: str) -> None:
    cpu, cuda = map(says_yes, row("supported.md", supported)[:2])
    cell = row("coming-from.md", compared)[0]
    assert bool(ON_CPUS_ONLY.search(cell)) == (cpu and not cuda), cell


def test_no_page_says_that_something_was_never_measured_of_what_the_appendix_has() -> None:
    """A GPU is in the appendix: no page may say that none was measured."""
    assert (DOCS / "engineering" / "measurements" / "gpus.md").is_file()
    denial = re.compile(r"\b(?:no|No) GPU (?:has been|was) measured|All figures here are from CPUs")
    assert not [page.name for page in DOCS.rglob("*.md") if denial.search(page.read_text())]
