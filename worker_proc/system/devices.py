"""Device, dtype and threads: what `auto` means on this machine."""

import ctypes
import os

import psutil
import torch

from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError
from quadriga.runtime.cpu_affinity import CpuPlan, pin_to, plan_cpus

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str, rank: int = 0) -> torch.device:
    """auto takes cuda, then mps, then cpu; each rank a card of its own. ConfigError for a device
    that is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return _cuda(torch.device("cuda", rank), rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"device is {name!r}: it must be auto, cpu, cuda, cuda:N or mps"
        ) from None
    if device.type == "cuda":
        return _cuda(torch.device("cuda", (device.index or 0) + rank), rank)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device is mps, but torch finds none here; start with --device cpu")
    if device.type not in ("cpu", "mps"):
        raise ConfigError(f"device is {name!r}: it must be auto, cpu, cuda, cuda:N or mps")
    return device


def _cuda(device: torch.device, rank: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        build = "" if torch.version.cuda else f"; torch {torch.__version__} is built without CUDA"
        raise ConfigError(
            f"device is {device}, but torch finds {count} CUDA devices here{build};"
            " start with --device cpu" + (", or with fewer --tp" if rank else "")
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device, native: bool = False) -> torch.dtype:
    """auto takes bfloat16 where it is multiplied fast: by the hardware, or by the native kernels,
    which will compute. ConfigError for float16 on cpu."""
    if name == "auto":
        return torch.bfloat16 if native or _fast_bfloat16(device) else torch.float32
    if name == "float16" and device.type == "cpu":
        raise ConfigError(
            "dtype float16 is slow and overflows on a cpu; use --dtype bfloat16 or float32"
        )
    return DTYPES[name]


def _fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return any(
            getattr(torch.cpu, probe, lambda: False)()
            for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        )
    return False


def take_cores(args: WorkerArgs) -> CpuPlan:
    """The worker's share of the cores, for this process. Call it before torch computes anything:
    its threads run where the one that started them may."""
    mine = plan_cpus(args)
    pin_to(mine.worker)
    torch.set_num_threads(mine.threads)
    return mine


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def give_back_freed_memory() -> None:
    """What loading has freed goes back to the system, where the C library keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
