"""The stages of bench.gpu.all: what is run, in which order, and for how long."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIRST_LIMIT_S = 600  # of the stages that are run first, together
KERNEL_TESTS = ("tests/unit/gpu/test_triton_kernels.py", "tests/unit/gpu/test_triton_sampling.py")
ENGINE_TESTS = (
    "tests/gpu",
    "tests/unit/gpu/test_triton_graphs.py",
    "tests/unit/gpu/test_triton_engine.py",
    "tests/unit/gpu/test_triton_experts.py",
)
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True, slots=True)
class Stage:
    """A command with a time limit.

    Attributes:
        name: Of its log, and of its section in the report.
        command: What is run.
        limit_s: Seconds after which it is stopped.
        is_first: It belongs to the stages that answer within ten minutes.
        gives_figures: The command takes `--json FILE`.
        missing: Why it cannot run here; "": it can.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    is_first: bool = False
    gives_figures: bool = True
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where the stages run.

    Attributes:
        models: The directory of bench.gpu.prepare.
        device: cuda, or cpu: every stage with tiny constants and the model tiny.
    """

    models: Path
    device: str

    @property
    def is_tiny(self) -> bool:
        """Whether everything is small, for a machine without a GPU."""
        return self.device == "cpu"

    def model(self, name: str) -> list[str]:
        """Return the flags of a prepared model with random weights."""
        directory = self.models / ("tiny" if self.is_tiny else name)
        flags = ["--model", str(directory), "--load-format", "dummy", "--device", self.device]
        return [*flags, "--attention-backend", "torch"] if self.is_tiny else flags


def stages_of(setup: Setup) -> list[Stage]:
    """Return all stages; those that answer first come first."""
    return [*_first_stages(setup), *_further_stages(setup)]


def _first_stages(setup: Setup) -> list[Stage]:
    tiny = setup.is_tiny
    sanitizer = shutil.which(SANITIZER)
    ceilings = ["--width", "256", "--bytes", str(2**20)] if tiny else []
    return [
        Stage("versions", _module("bench.gpu.versions"), 30, True),
        Stage(
            "ceilings", _module("bench.gpu.ceilings", "--device", setup.device, *ceilings), 40, True
        ),
        _tests("kernel-tests", KERNEL_TESTS, 110, "activations" if tiny else ""),
        _tests("engine-tests", ENGINE_TESTS, 150, "sizes" if tiny else ""),
        Stage(
            "memcheck",
            (SANITIZER, "--tool", "memcheck", *_pytest(KERNEL_TESTS[:1], "decode_rows or pages")),
            60,
            True,
            gives_figures=False,
            missing="" if sanitizer else f"{SANITIZER} of the CUDA toolkit is not on the PATH",
        ),
        _floor(setup, "floor", "gpt2", 70, is_first=True),
        _block(setup, "width", "width", 70, ["--warmup-runs", "2", "--repeat-runs", "3"], True),
        _block(setup, "streams", "streams", 70, ["--warmup-runs", "1"], True),
    ]


def _further_stages(setup: Setup) -> list[Stage]:
    tiny = setup.is_tiny
    drawn = ["--warmup-runs", "1", "--temperature", "0.8", "--top-p", "0.9"]
    prefill = ["--shapes", "1x8", "2x16", "1x4+32", "--steps", "2", "--ceiling-width", "64"]
    products = ["--device", setup.device, *(["--tiny"] if tiny else [])]
    return [
        _block(setup, "width-top-p", "width", 90, drawn),
        Stage("products", _module("bench.gpu.products", *products), 240),
        _profile(setup, "profile", "gpt2"),
        _profile(setup, "profile-8b", "llama8b"),
        Stage(
            "prefill",
            _module("bench.gpu.prefill", *setup.model("llama8b"), *(prefill if tiny else [])),
            120,
        ),
        _block(setup, "prefill-load", "prefill", 90, ["--warmup-runs", "1"]),
        _block(setup, "paced", "paced", 90, ["--warmup-runs", "1"]),
        _floor(setup, "floor-1b", "llama1b", 120),
        _floor(setup, "floor-8b", "llama8b", 180),
        _flashinfer(setup),
        Stage(
            "peers",
            _module(
                "bench.gpu.peers",
                "--model",
                _directory(setup, "gpt2"),
                "--device",
                setup.device,
                *(_TINY_LOAD if tiny else []),
            ),
            600,
        ),
    ]


_TINY_LOAD = [
    "--num-requests",
    "4",
    "--input-len",
    "8",
    "--output-len",
    "4",
    "--concurrency",
    "2",
    "--warmup-runs",
    "0",
    "--repeat-runs",
    "1",
]


def _module(name: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *flags)


def _pytest(paths: Sequence[str], expression: str) -> tuple[str, ...]:
    flags = ["-k", expression] if expression else []
    return (*_module("pytest", "-q", "-p", "no:cacheprovider", "-n0"), *flags, *paths)


def _tests(name: str, paths: Sequence[str], limit_s: int, expression: str) -> Stage:
    return Stage(name, _pytest(paths, expression), limit_s, True, gives_figures=False)


def _directory(setup: Setup, name: str) -> str:
    return str(setup.models / ("tiny" if setup.is_tiny else name))


def _floor(
    setup: Setup,
    name: str,
    model: str,
    limit_s: int,
    is_first: bool = False,
    further: Sequence[str] = (),
    missing: str = "",
) -> Stage:
    tiny = ["--batches", "1", "2", "--contexts", "16", "--steps", "3", "--ceiling-width", "64"]
    sizes = tiny if setup.is_tiny else []
    command = _module("bench.gpu.decode_floor", *setup.model(model), *sizes, *further)
    return Stage(name, command, limit_s, is_first, missing=missing)


def _profile(setup: Setup, name: str, model: str) -> Stage:
    sizes = ["--batches", "2", "--context", "16", "--prompt", "8", "--steps", "2"]
    flags = [*setup.model(model), *(sizes if setup.is_tiny else [])]
    return Stage(name, _module("bench.gpu.profile", *flags), 120)


def _flashinfer(setup: Setup) -> Stage:
    """Return the floor with FlashInfer, whose kernels are compiled in a minute or two."""
    missing = "FlashInfer needs a GPU" if setup.is_tiny else ""
    backend = ["--attention-backend", "flashinfer"]
    return _floor(setup, "floor-flashinfer", "llama8b", 400, further=backend, missing=missing)


def _block(
    setup: Setup, name: str, block: str, limit_s: int, flags: Sequence[str], is_first: bool = False
) -> Stage:
    """Return a load of bench.gpu.blocks; flags that come later win."""
    tiny = (
        [
            "--num-requests",
            "4",
            "--max-new-tokens",
            "4",
            "--warmup-runs",
            "1",
            "--repeat-runs",
            "1",
            "--max-batch-size",
            "4",
        ]
        if setup.is_tiny
        else []
    )
    command = _module("bench.gpu.blocks", "--only", block, *setup.model("gpt2"), *flags, *tiny)
    return Stage(name, command, limit_s, is_first)
