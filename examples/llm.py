"""A model in a program, without a server that is started by hand.

python examples/llm.py [MODEL]
"""

import sys

from quadriga import LLM, SamplingParams

prompts = ["The capital of France is", "One, two, three,", "Once upon a time"]
params = SamplingParams(max_tokens=24, temperature=0)

with LLM(*sys.argv[1:2], max_batch_size=8) as llm:
    for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
        print(f"{prompt!r} -> {completion.text!r}")
        print(f"    first token after {completion.timings.ttft:.3f} s")
