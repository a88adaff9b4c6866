"""Stream a chat, then ask several prompts at once.

python examples/stream.py [ENDPOINT]
"""

import sys

from quadriga.client import Client, SamplingParams

endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"
greedy = SamplingParams(temperature=0, max_new_tokens=32)

with Client(endpoint) as client:
    for chunk in client.stream(
        [{"role": "user", "content": "Name the capital of France."}], greedy
    ):
        print(chunk.text, end="", flush=True)
    print()

    for completion in client.generate(["One, two, three,", [40, 41, 42]], greedy):
        seconds = completion.timings.delivered - completion.timings.submitted
        print(f"{completion.finish_reason} in {seconds:.2f} s: {completion.text!r}")
