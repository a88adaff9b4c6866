"""Serve tiny models and compare their greedy tokens with transformers, on this machine's CPU.

`make_root.sh` runs this in a root for ARM64. float32 must be equal to the token; for weights in 16,
8 and 4 bits the server must answer, a prompt alone the same as among others.
"""

import logging
import platform
import sys
import tempfile
import time
from pathlib import Path

from quadriga import LLM, SamplingParams
from quadriga.llm import ServerFlags
from tests.references import greedy_of
from tests.tiny_models import tiny_gemma2, tiny_llama, tiny_qwen3

MODELS = {"Llama": tiny_llama, "Qwen3": tiny_qwen3, "Gemma 2": tiny_gemma2}
PROMPTS = ["a", "hello world", "one two three four five six seven eight nine ten", "The"]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
FORMATS: dict[str, ServerFlags] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}


def answers(directory: Path, flags: ServerFlags) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of the prompts one after another, and all at once."""
    common = ServerFlags(
        attention_backend="native",
        max_total_tokens=4096,
        start_timeout=3600,
        watchdog_timeout=3600,
        log_level="info",
    )
    with LLM(directory, **common | flags) as llm:
        alone = [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
        together = [result.token_ids for result in llm.generate(PROMPTS, GREEDY)]
    return alone, together


def encode(directory: Path) -> list[list[int]]:
    """Return the prompts as the server encodes them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def main() -> None:
    """Run the models of the command line, or all, and exit with 1 at the first difference."""
    logging.basicConfig(level=logging.INFO)
    print(platform.machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or MODELS:
            directory = MODELS[name](Path(folder) / name.replace(" ", ""))
            begin = time.monotonic()
            expected = greedy_of(directory, encode(directory), NUM_TOKENS)
            for format_name, flags in {"float32": ServerFlags(dtype="float32"), **FORMATS}.items():
                alone, together = answers(directory, flags)
                if alone != together or (format_name == "float32" and alone != expected):
                    sys.exit(f"{name}, {format_name}: {alone}, {together}; expected {expected}")
                same = "equal to transformers" if alone == expected else "equal alone and together"
                seconds = time.monotonic() - begin
                print(f"{name}, {format_name}: {same}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
