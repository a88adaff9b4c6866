"""Choose the device, the dtype and the CPU cores of the worker."""

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ONLY_REPLICA, ReplicaPlace, WorkerArgs
from quadriga.server.processes.machine import (
    GPU_DEVICE,
    NUMA_NODES,
    CpuPlan,
    Cpus,
    parse_cpus,
    pin_to,
    plan_cpus,
    prefer_memory_of,
)

MIN_CAPABILITY = (8, 0)  # compute capability of the first GPUs that multiply bfloat16
PCI_DEVICES = Path("/sys/bus/pci/devices")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(
    name: str, rank: int = 0, tp: int = 1, replica: ReplicaPlace = ONLY_REPLICA
) -> torch.device:
    """Return a rank's device; `auto` prefers cuda to mps to cpu. Each rank has its own GPU.

    Args:
        name: the value of --device.
        rank: the rank within its replica.
        tp: ranks of each replica.
        replica: the replica of the rank.

    Raises:
        ConfigError: the device is unknown, torch does not find it, or it is a GPU that is too old.
    """
    if name == "auto":
        name = _best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"device is {name!r}: it must be auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda":
        first = device.index or 0
        check_devices(torch.cuda.device_count(), first, tp, replica.num_replicas)
        return _cuda(first + replica.number * tp + rank, rank)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device is mps, but torch finds none here; start with --device cpu")
    return device


def _best_device() -> str:
    """Return what `auto` means here; log a warning where a GPU cannot be used."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    if GPU_DEVICE.exists():
        logging.warning(
            "an NVIDIA GPU is here, but %s: the CPU computes instead, more slowly;"
            " docs/install-gpu.md has the builds of torch for each driver (--device cpu: no"
            " warning)",
            _why_no_cuda(),
        )
    return "cpu"


def _why_no_cuda() -> str:
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: {error}"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device"


def check_devices(num_present: int, first: int, tp: int, dp: int) -> None:
    """Raise ConfigError where several replicas need more GPUs than there are from `first` on."""
    num_usable = max(0, num_present - first)
    if dp > 1 and dp * tp > num_usable:
        possible = num_usable // tp
        remedy = f"start with --dp {possible}" if possible else "start with --device cpu"
        raise ConfigError(
            f"--dp {dp} with --tp {tp} needs {dp * tp} GPUs, and {num_usable} are there: {remedy}"
        )


def _cuda(index: int, rank: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        build = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
        raise ConfigError(
            f"device is cuda:{index}, but torch finds {count} CUDA devices here{build};"
            " start with --device cpu" + (", or with fewer --tp" if rank else "")
        )
    device = torch.device("cuda", index)
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"{device} has compute capability {capability[0]}.{capability[1]}, and the first one"
            " that is supported is 8.0: start with --device cpu"
        )
    return device


def use_gpu(device: torch.device) -> None:
    """Make a GPU the current device, with exact sums, and pin this process to its NUMA node.

    Kernels and streams belong to the current device. Call it before memory is pinned, which the
    node of the process gets.
    """
    torch.cuda.set_device(device)
    # cuBLAS may else add up the parts of a split product in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if hasattr(os, "sched_setaffinity"):
        pin_to(cpus_beside(device) & os.sched_getaffinity(0))


def cpus_beside(device: torch.device) -> Cpus:
    """Return the CPUs of the NUMA node that a GPU is connected to; none if it is not known."""
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's types lack the address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((PCI_DEVICES / address / "numa_node").read_text())
        return frozenset(parse_cpus((NUMA_NODES / f"node{node}/cpulist").read_text()))
    except (OSError, ValueError):  # node -1: the machine has one
        return frozenset()


def choose_dtype(name: str, device: torch.device, native: bool = False) -> torch.dtype:
    """Return the dtype of weights and KV pages.

    `auto` is bfloat16 if it is multiplied fast, and else float32.

    Args:
        name: auto, float32, bfloat16 or float16.
        device: of the model.
        native: the native kernels, which multiply bfloat16 fast, will run the model.

    Raises:
        ConfigError: float16 was asked for on a cpu.
    """
    if name == "auto":
        return torch.bfloat16 if native or _fast_bfloat16(device) else torch.float32
    if name == "float16" and device.type == "cpu":
        raise ConfigError(
            "dtype float16 is slow and overflows on a cpu; use --dtype bfloat16 or float32"
        )
    return DTYPES[name]


def _fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cpu":
        return any(
            getattr(torch.cpu, probe, lambda: False)()
            for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        )
    return device.type == "cuda"


def take_cores(args: WorkerArgs, replica: ReplicaPlace = ONLY_REPLICA) -> CpuPlan:
    """Restrict this process to the worker's share of the CPU cores, and return the shares.

    Call it before torch computes anything, as its threads inherit the cores of the first one.
    """
    plan = plan_cpus(args, replica)
    pin_to(plan.worker)
    prefer_memory_of(plan.node)
    if plan.node is not None:
        logging.info(
            "threads and memory are of NUMA node %d; --numa-node all takes all nodes", plan.node
        )
    torch.set_num_threads(plan.threads)
    return plan


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def trim_heap() -> None:
    """Return freed memory to the system, if the C library keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
