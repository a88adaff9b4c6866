"""Measure what a device can do at most: read and copy memory, multiply matrices.

    python -m bench.gpu.ceilings

Prints before that the versions and devices that other measurements stand for.
"""

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from bench.cli.command import command_parser, run_command
from bench.report.table import FigureRow, add_json_flag, show
from worker_proc.startup.devices import choose_device

NUM_ROUNDS, NUM_CALLS = 12, 5
# So large that the start of a kernel, about 5 us, is no part of the result.
GPU_BYTES, CPU_BYTES = 8 * 2**30, 2**28
PACKAGES = ("torch", "triton", "numpy", "transformers", "flashinfer-python", "vllm", "sglang")
NVIDIA_SMI = (
    "nvidia-smi",
    "--format=csv,noheader",
    "--query-gpu=name,driver_version,memory.total,memory.free,clocks.max.sm,clocks.max.memory,"
    "power.limit",
)


def seconds_of(
    call: Callable[[], object], device: torch.device, num_rounds: int = NUM_ROUNDS
) -> float:
    """Return the median seconds of a call, on a GPU by its own clock.

    On a GPU several calls are launched at once, so that it does not wait for the host.
    """
    call()
    if device.type != "cuda":
        return median(_host_seconds(call) for _ in range(num_rounds))
    seconds: list[float] = []
    for _ in range(num_rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(NUM_CALLS):
            call()
        ended.record()
        ended.synchronize()
        seconds.append(float(began.elapsed_time(ended)) / 1000 / NUM_CALLS)
    return median(seconds)


def _host_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def default_bytes(device: torch.device) -> int:
    """Return the size of the tensor that is read: far more than caches hold."""
    return GPU_BYTES if device.type == "cuda" else CPU_BYTES


def read_bytes_per_second(device: torch.device, size: int = 0) -> float:
    """Return the speed of summing a tensor of `size` bytes; 0: the default size."""
    size = size or default_bytes(device)
    values = torch.ones(size // 4, device=device)
    return size / seconds_of(values.sum, device)


def copied_bytes_per_second(device: torch.device, size: int = 0) -> float:
    """Return the bytes per second that are read, and written, by a copy."""
    size = size or default_bytes(device)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def flops_per_second(device: torch.device, width: int, dtype: torch.dtype) -> float:
    """Return the rate of multiplying two square matrices of `width` rows."""
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return float(2 * width**3 / seconds_of(lambda: a @ b, device))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the device of a command line, and return the exit code 0."""
    parser = command_parser("bench.gpu.ceilings", __doc__)
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument(
        "--width",
        type=int,
        default=8192,
        help="rows of the square matrices that are multiplied (default: 8192)",
    )
    parser.add_argument(
        "--bytes",
        type=int,
        default=0,
        help="of the tensors that are read and copied (default: 8 GiB on a GPU)",
    )
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.ceilings", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    show("versions", [*_software(), *_devices()], arguments.json)
    device = choose_device(arguments.device)
    rows: list[FigureRow] = [
        {"what": "read, GB/s", "value": read_bytes_per_second(device, arguments.bytes) / 1e9},
        {"what": "copy, GB/s", "value": copied_bytes_per_second(device, arguments.bytes) / 1e9},
    ]
    for dtype in (torch.bfloat16, torch.float32):
        rate = flops_per_second(device, arguments.width, dtype)
        rows.append({"what": f"{str(dtype).removeprefix('torch.')}, TFLOP/s", "value": rate / 1e12})
    show(f"ceilings of {device}", rows, arguments.json)
    return 0


def _software() -> list[FigureRow]:
    rows: list[FigureRow] = [{"what": "python", "value": platform.python_version()}]
    for name in PACKAGES:
        try:
            rows.append({"what": name, "value": importlib.metadata.version(name)})
        except importlib.metadata.PackageNotFoundError:
            rows.append({"what": name, "value": None})
    return rows


def _devices() -> list[FigureRow]:
    rows: list[FigureRow] = [{"what": "CUDA of torch", "value": torch.version.cuda}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        value = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor},"
            f" {properties.multi_processor_count} multiprocessors,"
            f" {properties.total_memory / 2**30:.1f} GiB"
        )
        rows.append({"what": f"cuda:{index}", "value": value})
    if shutil.which(NVIDIA_SMI[0]):
        output = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, check=False).stdout
        rows += [{"what": NVIDIA_SMI[0], "value": line} for line in output.splitlines()]
    return rows


if __name__ == "__main__":
    sys.exit(main())
