"""Arrows run one way: the processes meet only in quadriga/, and torch lives in the worker."""

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.imported_names import imported_names

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc", "http_proc",
             "cluster_proc")  # fmt: skip
HEAVY = {"torch", "transformers"}
BENCHES_OF_THE_WORKER = {
    "drafts.py",
    "few_rows.py",
    "products.py",
    "ceilings.py",
    "decode_floor.py",
    "machine_speed.py",
    "engine.py",
    "formats.py",
    "kernel_cases.py",
    "kernels.py",
    "permuted.py",
    "profile.py",
    "random_weights.py",
    "transformers_batching.py",
    "versions.py",
    "worker_steps.py",
}
"""They compute beside the worker's own code, in one process, or write its checkpoints."""
SOCKET_FILES = ("sockets.py", "async_port.py", "connection_watch.py", "curve.py", "node_links.py",
                "peer_watch.py")  # fmt: skip


def roots_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_names(path)}


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


@pytest.mark.parametrize(
    "folder",
    ["tokenizer_proc", "scheduler_proc", "detok_proc", "http_proc", "cluster_proc", "bench"],
)
def test_torch_and_transformers_live_in_the_worker_only(folder: str) -> None:
    for path in [*files(folder), ROOT / "launcher.py"]:
        if path.name not in BENCHES_OF_THE_WORKER:
            assert not roots_of(path) & HEAVY, path


def test_the_scheduler_sees_no_text_library() -> None:
    for path in files("scheduler_proc"):
        assert not roots_of(path) & {"tokenizers", "jinja2", "numpy"}, path


def test_only_the_files_of_sockets_import_zmq() -> None:
    for folder in (*PROCESSES, "quadriga", "bench"):
        for path in files(folder):
            if path.name not in SOCKET_FILES:
                assert "zmq" not in roots_of(path), path


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


def test_no_modules_of_quadriga_import_each_other() -> None:
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in files("quadriga")}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {
        name: imported_names(path) & (modules.keys() - {name, "quadriga"})
        for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    "module",
    ["launcher", "quadriga.client", "scheduler_proc.main", "tokenizer_proc.main",
     "worker_proc.main", "detok_proc.main", "http_proc.main", "cluster_proc.main",
     "cluster_proc.crew", "bench.serving"],
)  # fmt: skip
def test_importing_it_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in {sorted(HEAVY)}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
