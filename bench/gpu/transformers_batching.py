"""Measure transformers' continuous batching on the same GPU.

    python -m bench.gpu.transformers_batching --load-format dummy

Prints tokens/s. Compare with `python -m bench.gpu.blocks --only width --model gpt2
--load-format dummy`.
"""

import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.command import command_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 0 measured, 2 no such device."""
    parser = command_parser("bench.gpu.transformers_batching", __doc__)
    parser.add_argument("--model", default="gpt2", help="Hub id or directory (default: gpt2)")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"),
                        help="dummy: GPT-2 with random weights")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="with dummy: two narrow layers")
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument("--num-requests", type=int, default=256, help="(default: 256)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="(default: 32)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(default: 64)")
    arguments = parser.parse_args(argv)

    import torch
    import transformers

    library: Any = transformers

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: --device is cuda, but torch finds no GPU", file=sys.stderr)
        return 2
    model: Any
    if arguments.load_format == "dummy":
        sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4} if arguments.tiny else {}
        model = library.AutoModelForCausalLM.from_config(
            library.GPT2Config(**sizes), dtype=torch.bfloat16
        )
    else:
        model = library.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    model = model.to(arguments.device).eval()
    source = random.Random(0)
    prompts = [
        [source.randrange(3, model.config.vocab_size) for _ in range(arguments.prompt_tokens)]
        for _ in range(arguments.num_requests)
    ]
    settings = library.GenerationConfig(max_new_tokens=arguments.max_new_tokens, do_sample=False,
                                eos_token_id=-1, pad_token_id=0)  # fmt: skip
    cache = library.ContinuousBatchingConfig(
        # The default takes a share of the free memory, which a CPU needs a minute to write to.
        **({"num_blocks": 8, "max_batch_tokens": 64} if arguments.tiny else {})
    )
    for name, batch in (("warm-up", prompts[:8]), ("measured", prompts)):
        began = time.perf_counter()
        outputs = model.generate_batch(
            inputs=batch, generation_config=settings, continuous_batching_config=cache
        )
        seconds = time.perf_counter() - began
        tokens = sum(len(output.generated_tokens) for output in outputs.values())
        print(f"{name}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
