"""Write what the measurements need to a directory, for a GPU machine without a network.

    python -m bench.gpu.prepare gpu-files                       # models and wheels
    python -m bench.gpu.prepare gpu-files --no-wheels           # models only
    pip install --no-index --no-deps --target site gpu-files/wheels/*.whl     # on that machine

Models are config.json and a tokenizer, for `--load-format dummy`: gpt2, llama1b, llama8b, and tiny,
with which every stage of bench.gpu.all runs on a CPU. Wheels are the dependencies of a server that
such a machine is likely to lack; torch and triton are not among them. Prints the size of each part.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.peers.models import TOKENIZER_FILES
from quadriga.errors import ConfigError
from quadriga.programs import PROGRAMS_DIR
from quadriga.server.config.engine_args import BUILTIN_MODEL
from quadriga.server.models.families import gpt
from quadriga.server.models.formats.gguf_config import header_files
from quadriga.server.models.sources import builtin_weights

WHEELS = (
    "pyzmq",
    "msgspec",
    "llguidance",
    "gguf",
    "sortedcontainers",
    "prometheus_client",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "humming-kernels",
)
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_26", "manylinux_2_17")
MAX_MEGABYTES = 60.0
# From the config.json of Llama 3.2 1B and Llama 3.1 8B, with contexts that the loads need.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": gpt.gpt2_config_json(gpt.GPT2_SIZES["gpt2"]),
    "llama1b": LLAMA
    | {
        "hidden_size": 2048,
        "head_dim": 64,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "llama8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    "tiny": LLAMA
    | {
        "hidden_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "vocab_size": 50_304,
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files of a command line, and return the exit code: 1 if they are too large."""
    parser = command_parser("bench.gpu.prepare", __doc__)
    parser.add_argument("directory", type=Path, help="where to write; it may exist")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIRECTORY",
        help=f"tokenizer of the models (default: that of {BUILTIN_MODEL})",
    )
    parser.add_argument("--no-wheels", action="store_true", help="write only the models")
    parser.add_argument(
        "--python-version",
        default="3.12",
        metavar="X.Y",
        help="of the machine with the GPU (default: 3.12)",
    )
    parser.add_argument(
        "--with-package",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="a further wheel, such as flashinfer-python==0.6.14",
    )
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=MAX_MEGABYTES,
        metavar="MB",
        help=f"fail if all files are larger (default: {MAX_MEGABYTES:g})",
    )
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.prepare", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory
    tokenizer = arguments.tokenizer or header_files(builtin_weights(show_progress=True))
    for name, config in MODELS.items():
        write_model(directory / name, config, tokenizer)
    if not arguments.no_wheels:
        download_wheels(directory / "wheels", arguments.python_version, arguments.with_package)
    return _check_size(directory, arguments.max_megabytes)


def write_model(directory: Path, config: dict[str, Any], tokenizer: Path) -> None:
    """Write config.json and the files of a tokenizer, with the tokenizer's end-of-text ids.

    Raises:
        ConfigError: the directory of the tokenizer has none.
    """
    if not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(
            f"--tokenizer {tokenizer} has no tokenizer.json: give a directory that has one, or"
            " leave the flag out"
        )
    directory.mkdir(parents=True, exist_ok=True)
    special: dict[str, Any] = {}
    if (tokenizer / "config.json").is_file():
        source = json.loads((tokenizer / "config.json").read_text())
        special = {key: source.get(key) for key in ("bos_token_id", "eos_token_id")}
    text = json.dumps({**config, **special, "dtype": "bfloat16"}, indent=1)
    (directory / "config.json").write_text(text + "\n")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, directory)


def download_wheels(directory: Path, python_version: str, further: Sequence[str] = ()) -> None:
    """Download wheels for another Python, in the versions of constraints.txt.

    Raises:
        ConfigError: pip failed; with its last line.
    """
    tags = [f"--platform={name}_x86_64" for name in (*PLATFORMS, "manylinux2014")]
    abi = f"cp{python_version.replace('.', '')}"
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
        *(f"--python-version={python_version}", "--implementation=cp", *tags, "--platform=any"),
        *(f"--abi={abi}", "--abi=abi3", "--abi=none", f"--dest={directory}"),
        *(f"--constraint={PROGRAMS_DIR / 'constraints.txt'}", *WHEELS, *further),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ConfigError(
            f"pip download failed: {reason}; check the network, or use --no-wheels for the models"
        )


def _check_size(directory: Path, max_megabytes: float) -> int:
    """Print the size of each part; return 1 if their sum is too large."""
    sizes = {
        part.name: sum(path.stat().st_size for path in part.rglob("*") if path.is_file()) / 1e6
        for part in sorted(directory.iterdir())
        if part.is_dir()
    }
    for name, megabytes in sizes.items():
        print(f"{name:<12}{megabytes:8.1f} MB")
    total = sum(sizes.values())
    print(f"{'all':<12}{total:8.1f} MB")
    if total <= max_megabytes:
        return EXIT_OK
    print(
        f"bench.gpu.prepare: {directory} has {total:.1f} MB, --max-megabytes is {max_megabytes:g}:"
        " remove what is not needed, or raise it",
        file=sys.stderr,
    )
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
