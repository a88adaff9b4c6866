"""Arrows run one way: the processes meet only in quadriga/, and torch lives in the worker."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.imported_names import imported_names

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc", "http_proc",
             "cluster_proc")  # fmt: skip
HEAVY = {"torch", "transformers"}
BENCHES_OF_THE_WORKER = {
    "bench/gpu/ceilings.py",
    "bench/gpu/decode_floor.py",
    "bench/gpu/few_rows.py",
    "bench/gpu/kernel_cases.py",
    "bench/gpu/kernels.py",
    "bench/gpu/products.py",
    "bench/gpu/profile.py",
    "bench/gpu/random_weights.py",
    "bench/gpu/transformers_batching.py",
    "bench/gpu/versions.py",
    "bench/quality/engine.py",
    "bench/quality/permuted.py",
    "bench/roofline/formats.py",
    "bench/roofline/machine_speed.py",
    "bench/speculation/drafts.py",
    "bench/worker_steps.py",
}
"""They compute beside the worker's own code, in one process, or write its checkpoints."""
SOCKET_FILES = {
    "quadriga/wire/async_port.py",
    "quadriga/wire/connection_watch.py",
    "quadriga/wire/curve.py",
    "quadriga/wire/node_links.py",
    "quadriga/wire/peer_watch.py",
    "quadriga/wire/sockets.py",
}


def roots_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(path)}


def importers_of(packages: set[str], paths: list[Path]) -> set[str]:
    """Return the files that import one of these packages, by their paths from the root."""
    return {str(path.relative_to(ROOT)) for path in paths if roots_of(path) & packages}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", PROCESSES)
def test_no_process_imports_another(folder: str) -> None:
    others = set(PROCESSES) - {folder} | {"bench", "launcher", "tests"}
    for path in files(folder):
        assert not roots_of(path) & others, path


def test_quadriga_imports_no_process_and_nothing_heavy() -> None:
    for path in files("quadriga"):
        assert not roots_of(path) & {*PROCESSES, "bench", "tests", "launcher"}, path
        assert not roots_of(path) & HEAVY, path


def test_torch_and_transformers_live_in_the_worker_only() -> None:
    folders = [folder for folder in (*PROCESSES, "bench") if folder != "worker_proc"]
    paths = [path for folder in folders for path in files(folder)] + [ROOT / "launcher.py"]
    assert importers_of(HEAVY, paths) == BENCHES_OF_THE_WORKER


def test_the_scheduler_sees_no_text_library() -> None:
    for path in files("scheduler_proc"):
        assert not roots_of(path) & {"tokenizers", "jinja2", "numpy"}, path


def test_only_the_files_of_sockets_import_zmq() -> None:
    folders = (*PROCESSES, "quadriga", "bench")
    paths = [path for folder in folders for path in files(folder)] + [ROOT / "launcher.py"]
    assert importers_of({"zmq"}, paths) == SOCKET_FILES


LAYERS = {
    "errors": set(),
    "programs": set(),
    "disk": {"errors"},
    "windows": set(),
    "sampling": {"errors", "keywords"},
    "wire": {"disk", "errors", "sampling"},
    "config": {"disk", "errors", "keywords", "known_formats", "programs", "__version__"},
    "tenants": {"clock", "disk", "errors", "programs"},
    "model_files": {"disk", "errors", "config", "programs", "windows"},
    "client": {"errors", "keywords", "clock", "sampling", "wire", "config"},
    "runtime": {"errors", "clock", "wire", "config"},
    "supervisor": {"errors", "clock", "config", "runtime"},
    "llm": {"errors", "keywords", "sampling", "wire", "config", "client", "programs"},
    "cli": {
        "disk",
        "errors",
        "keywords",
        "sampling",
        "wire",
        "config",
        "model_files",
        "client",
        "runtime",
        "__version__",
        "programs",
        "tenants",
        "tracing",
        "windows",
    },
    "tracing": {"__version__", "config", "runtime", "wire"},
}
"""What each part of quadriga/ may import of the others."""


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_inside_quadriga(layer: str) -> None:
    paths = files(f"quadriga/{layer}") or [ROOT / "quadriga" / f"{layer}.py"]
    for path in paths:
        parts = {
            name.split(".")[1] for name in imported_names(path) if name.startswith("quadriga.")
        }
        assert parts <= LAYERS[layer] | {layer}, path


@pytest.mark.parametrize(
    "module",
    ["launcher", "quadriga.client", "scheduler_proc.main", "tokenizer_proc.main",
     "worker_proc.main", "detok_proc.main", "http_proc.main", "cluster_proc.main",
     "cluster_proc.crew", "bench.serving"],
)  # fmt: skip
def test_importing_it_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in {sorted(HEAVY)}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
