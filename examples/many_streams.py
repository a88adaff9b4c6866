"""Sixteen streams at once on one connection, with AsyncClient.

python examples/many_streams.py [ENDPOINT]
"""

import asyncio
import sys

from quadriga.client import AsyncClient, SamplingParams

endpoint = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"


async def complete(client: AsyncClient, number: int) -> str:
    """Stream one completion and return its text."""
    text = ""
    params = SamplingParams(max_new_tokens=16, temperature=0.8, seed=number)
    async for chunk in client.stream(f"{number} is a number that", params):
        text += chunk.text
    return text


async def main() -> None:
    """Run all streams at the same time."""
    async with AsyncClient(endpoint) as client:
        texts = await asyncio.gather(*(complete(client, number) for number in range(16)))
        for number, text in enumerate(texts):
            print(f"{number:2} {text!r}")


asyncio.run(main())
