"""Measure each GPU kernel against what it reads or computes, and against other libraries.

    python -m bench.gpu.kernels
    python -m bench.gpu.kernels --device cpu --tiny       # in Triton's interpreter

Sizes are those of Llama 3.1 8B. A kernel's floor is its bytes at the measured read speed, or its
operations at the measured rate, whichever takes longer; what fits a GPU's cache is read faster. On
a GPU a kernel is replayed as a graph, so the host's launches are no part of its time. Beside ours:
torch's scaled_dot_product_attention over keys in one piece, cuBLAS, and FlashInfer for decode rows
where it is installed.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from bench.command import command_parser, run_command
from bench.report.figures import FigureRow, add_json_flag, show


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the kernels on the device of a command line, and return the exit code."""
    parser = command_parser("bench.gpu.kernels", __doc__)
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    parser.add_argument(
        "--only",
        metavar="WORD",
        default="",
        help="measure the kernels with this word in their names",
    )
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    return run_command("bench.gpu.kernels", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    from bench.gpu import ceilings
    from bench.gpu.kernel_cases import FULL, TINY, Cases
    from worker_proc.system.devices import choose_device

    if arguments.device == "cpu":
        from worker_proc.gpu.interpreter import accept_numpy_scalars

        accept_numpy_scalars()
    device, sizes = choose_device(arguments.device), TINY if arguments.tiny else FULL
    read = ceilings.read_bytes_per_second(device, sizes.ceiling_bytes)
    rate = ceilings.flops_per_second(device, sizes.ceiling_width, sizes.dtype)
    rows: list[FigureRow] = []
    for case in Cases(sizes, device).all(arguments.only):
        ms = 1000 * _seconds(case.run, device.type)
        least = 1000 * max(case.num_bytes / read, case.num_operations / rate)
        other = 1000 * _seconds(case.other, device.type) if case.other is not None else None
        rows.append(
            {
                "kernel": case.kernel,
                "shape": case.shape,
                "ms": ms,
                "floor ms": least,
                "ratio": ms / least,
                "other": case.other_name or None,
                "other ms": other,
            }
        )
    show(f"kernels on {device}", rows, arguments.json)
    return 0


def _seconds(call: Callable[[], object], device_type: str) -> float:
    """Return the seconds of a call; on a GPU, of its replay as a graph."""
    import torch

    from bench.gpu.ceilings import seconds_of

    device = torch.device(device_type)
    with torch.inference_mode():
        if device_type != "cuda":
            return seconds_of(call, device, num_rounds=2)
        call()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return seconds_of(graph.replay, device)


if __name__ == "__main__":
    sys.exit(main())
