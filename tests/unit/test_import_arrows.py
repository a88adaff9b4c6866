"""Arrows run one way: the processes meet only in quadriga/, and torch lives in the worker."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.source_files import ROOT, house, imported_names

PROCESSES = ("tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc", "http_proc",
             "cluster_proc")  # fmt: skip
HEAVY = {"torch", "transformers"}
BENCHES_OF_THE_WORKER = {
    "bench/gpu/ceilings.py",
    "bench/gpu/decode_floor.py",
    "bench/gpu/products.py",
    "bench/gpu/tiers.py",
    "bench/gpu/profile.py",
    "bench/page_moves.py",
    "bench/peers/models.py",
    "bench/quality.py",
    "bench/roofline/adapters.py",
    "bench/roofline/machine_speed.py",
    "bench/train_adapter.py",
    "bench/worker_steps.py",
}
"""They compute beside the worker's own code, in one process, or write its checkpoints."""
SOCKET_FILES = {
    "quadriga/wire/async_sockets.py",
    "quadriga/wire/curve.py",
    "quadriga/wire/links.py",
    "quadriga/wire/page_link.py",
    "quadriga/wire/sockets.py",
    "scheduler_proc/kv_events/publisher.py",
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
    others = set(PROCESSES) - {folder} | {"bench", "simulator", "launcher", "tests"}
    for path in files(folder):
        assert not roots_of(path) & others, path


def test_quadriga_imports_no_process_and_nothing_heavy() -> None:
    for path in files("quadriga"):
        assert not roots_of(path) & {*PROCESSES, "bench", "tests", "launcher"}, path
        assert not roots_of(path) & HEAVY, path


def test_torch_and_transformers_live_in_the_worker_only() -> None:
    folders = [folder for folder in (*PROCESSES, "simulator", "bench") if folder != "worker_proc"]
    paths = [path for folder in folders for path in files(folder)] + [ROOT / "launcher.py"]
    assert importers_of(HEAVY, paths) == BENCHES_OF_THE_WORKER


def test_the_scheduler_sees_no_text_library() -> None:
    for path in files("scheduler_proc"):
        assert not roots_of(path) & {"tokenizers", "jinja2", "numpy"}, path


def test_only_the_files_of_sockets_import_zmq() -> None:
    folders = (*PROCESSES, "quadriga", "simulator", "bench")
    paths = [path for folder in folders for path in files(folder)] + [ROOT / "launcher.py"]
    assert importers_of({"zmq"}, paths) == SOCKET_FILES


LAYERS = {
    "errors": set(),
    "keywords": set(),
    "clock": set(),
    "programs": set(),
    "disk": {"errors"},
    "sampling": {"errors", "keywords"},
    "wire": {"disk", "errors", "sampling"},
    "client": {"errors", "keywords", "clock", "sampling", "wire"},
}
"""What each part of the first floor of quadriga/ may import of the others."""
SERVER_LAYERS: dict[str, set[str]] = {
    "cache": set(),
    "answer_format": set(),
    "model_info": set(),
    "model_list": set(),
    "prefix_blocks": set(),
    "histogram": set(),
    "tenants": set(),
    "grammars": set(),
    "config": {"answer_format"},
    "models": {"cache", "config"},
    "processes": {"config", "model_list"},
    "tracing": {"config", "processes"},
    "cli": {"config", "models", "processes", "tenants", "tracing"},
}
"""What each part of the second floor, quadriga/server, may import of it."""


def layer_files(folder: str, layer: str) -> list[Path]:
    return files(f"{folder}/{layer}") or [ROOT / folder / f"{layer}.py"]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_what_a_program_imports(layer: str) -> None:
    for path in layer_files("quadriga", layer):
        parts = {
            name.split(".")[1] for name in imported_names(path) if name.startswith("quadriga.")
        }
        assert parts <= LAYERS[layer] | {layer}, path


@pytest.mark.parametrize("layer", SERVER_LAYERS)
def test_layers_of_what_the_server_is_made_of(layer: str) -> None:
    for path in layer_files("quadriga/server", layer):
        parts = {
            name.split(".")[2]
            for name in imported_names(path)
            if name.startswith("quadriga.server.")
        }
        assert parts <= SERVER_LAYERS[layer] | {layer}, path


def test_only_llm_and_the_command_line_reach_the_second_floor() -> None:
    importers = {
        str(path.relative_to(ROOT))
        for path in files("quadriga")
        if "server" not in path.relative_to(ROOT).parts
        and any(name.startswith("quadriga.server") for name in imported_names(path))
    }
    assert importers == {"quadriga/llm/llm.py", "quadriga/__main__.py"}


def test_no_two_folders_import_each_other() -> None:
    pairs = house().pairs()
    assert not pairs, "\n".join(f"{pair.folders}: {pair.there} and {pair.back}" for pair in pairs)


HTTP_FREE = (
    "http_proc/answer", "http_proc/core", "http_proc/generation", "http_proc/jobs/batch_job.py",
    "http_proc/jobs/batch_lines.py",
)  # fmt: skip
"""What answers a call, for HTTP, for a line of a batch, and for a stream without a connection."""
HTTP_CLIENTS = {"http", "httpx", "requests", "urllib3"}
CONNECTING = {
    "ClientSession", "TCPConnector", "UnixConnector", "UnixSite", "create_connection",
    "create_unix_connection", "open_connection", "open_unix_connection", "urlopen",
}  # fmt: skip


def test_the_core_of_the_gateway_knows_no_http() -> None:
    paths = [path for name in HTTP_FREE for path in files(name) or [ROOT / name]]
    assert len(paths) > len(HTTP_FREE)
    assert not importers_of({"aiohttp"}, paths)
    for path in paths:
        assert not any(n.startswith("http_proc.web") for n in imported_names(path)), path


def test_the_gateway_sends_no_request_to_itself() -> None:
    for path in files("http_proc"):
        tree = ast.parse(path.read_text())
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        named |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not named & CONNECTING, path
        assert not {n for n in imported_names(path) if n.split(".")[0] in HTTP_CLIENTS} - {
            "http",
            "http.HTTPStatus",
        }, path


def test_the_simulator_stands_without_the_bench_and_no_process_imports_it() -> None:
    for path in files("simulator"):
        assert not roots_of(path) & {"bench", "tests", "launcher"}, path
    for folder in (*PROCESSES, "quadriga"):
        for path in files(folder):
            assert "simulator" not in roots_of(path), path


@pytest.mark.parametrize(
    "module",
    ["launcher", "quadriga.client", "scheduler_proc.main", "tokenizer_proc.main",
     "worker_proc.main", "detok_proc.main", "http_proc.main", "cluster_proc.main",
     "cluster_proc.crew", "bench.serving", "simulator.what_if"],
)  # fmt: skip
def test_importing_it_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in {sorted(HEAVY)}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
