"""Talk to a model: each line is a question, an empty line ends the program.

python examples/chat.py [MODEL]
"""

import sys

from quadriga import LLM, SamplingParams
from quadriga.client.types import Chat

messages: Chat = []
params = SamplingParams(max_tokens=256)

with LLM(*sys.argv[1:2]) as llm:
    while question := input("> "):
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in llm.stream(messages, params, clamp_max_new_tokens=True):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
        print()
        messages.append({"role": "assistant", "content": answer})
