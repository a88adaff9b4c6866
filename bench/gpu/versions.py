"""Print the versions and the device that other measurements stand for.

python -m bench.gpu.versions
"""

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench.cli.command import command_parser
from bench.report.table import FigureRow, add_json_flag, show

PACKAGES = ("torch", "triton", "numpy", "transformers", "flashinfer-python", "vllm", "sglang")
NVIDIA_SMI = (
    "nvidia-smi",
    "--format=csv,noheader",
    "--query-gpu=name,driver_version,memory.total,memory.free,clocks.max.sm,clocks.max.memory,"
    "power.limit",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the versions, and return the exit code 0."""
    parser = command_parser("bench.gpu.versions", __doc__)
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    show("versions", [*_software(), *_devices()], arguments.json)
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
    import torch

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
