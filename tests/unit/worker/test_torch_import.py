"""The worker imports torch without parts that a CPU's native engine has no use for."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.models.model_impl import ModelImpl
from worker_proc.startup import torch_import
from worker_proc.startup.torch_import import TESTED_RELEASES, can_defer

ROOT = Path(__file__).resolve().parents[3]
CPU = WorkerArgs(device="cpu")

# One process, as an import takes seconds.
PROGRAM = """
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.models.model_impl import ModelImpl
from quadriga.server.models.resolve import resolve_model
from worker_proc.startup import torch_import

torch_import.import_torch(WorkerArgs(device="cpu"), ModelImpl.NATIVE)
import torch
import worker_proc.startup.build
from worker_proc.loading.loader import load_model

model = load_model(resolve_model(ModelArgs()), torch.float32, torch.device("cpu"))
print(torch.isfinite(next(model.parameters())).all().item())
print([name for name in sorted(torch_import.DEFERRED) if torch_import.is_deferred(name)])
from worker_proc.loading.checkpoints import seeded_generator
print(seeded_generator(3).initial_seed())
try:
    torch.export.no_such_name
except AttributeError as error:
    print(error)
print(callable(torch.export.export), torch_import.is_deferred("torch.export"))
from torch._meta_registrations import meta_addbmm
matrices = torch.empty(2, 3, 4, device="meta"), torch.empty(2, 4, 5, device="meta")
print(torch.addbmm(torch.empty(3, 5, device="meta"), *matrices).shape == (3, 5))
"""


def test_the_installed_release_was_tested() -> None:
    assert version("torch").startswith(TESTED_RELEASES)


def test_modules_that_a_model_does_not_need_are_executed_at_their_first_use() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    assert process.stdout.splitlines() == [
        "True",
        "['torch._meta_registrations', 'torch.export']",
        "3",
        "module 'torch.export' has no attribute 'no_such_name'",
        "True False",
        "True",
    ]


@pytest.mark.parametrize(
    ("args", "impl"),
    [
        (WorkerArgs(device="cuda:0"), ModelImpl.NATIVE),
        (CPU, ModelImpl.TRANSFORMERS),
        (WorkerArgs(device="cpu", tp=2), ModelImpl.NATIVE),
    ],
    ids=["gpu", "transformers", "ranks"],
)
def test_other_workers_import_torch_whole(args: WorkerArgs, impl: ModelImpl) -> None:
    assert not can_defer(args, impl)


def test_an_unknown_release_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_import, "version", lambda _: "2.130.0")
    assert not can_defer(CPU, ModelImpl.NATIVE)
    monkeypatch.setattr(torch_import, "version", lambda _: "2.13.1+cpu")
    assert can_defer(CPU, ModelImpl.NATIVE)
