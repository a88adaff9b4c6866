"""Shares of tenants under overload, and the first token of one beside the queue of another.

    python -m bench.tenants --url http://127.0.0.1:8000 --key a=KEY:1 --key b=KEY:2 --key c=KEY:4

Every tenant keeps --concurrency requests open for --seconds. The report has the generated tokens of
each, and Jain's index of their shares divided by their weights (1: exactly fair). With --flood it
has the seconds to the first token of one request of the last tenant instead, sent on an idle server
and while many requests of the first tenant wait.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from typing import Any, NamedTuple

import aiohttp

from bench.command import command_parser


class BenchTenant(NamedTuple):
    """A tenant of the server, and its weight in the key file."""

    name: str
    key: str
    weight: float


def jain_index(shares: list[float]) -> float:
    """Return Jain's index of fairness: 1 for equal shares, 1/n where one has everything."""
    squares = sum(share**2 for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def parse_tenant(text: str) -> BenchTenant:
    """Return the tenant of NAME=KEY:WEIGHT."""
    name, _, rest = text.partition("=")
    key, _, weight = rest.rpartition(":")
    return BenchTenant(name, key, float(weight))


class TenantLoad:
    """Requests to one server, for one run."""

    def __init__(self, url: str, session: aiohttp.ClientSession, max_tokens: int) -> None:
        self._url = f"{url}/v1/completions"
        self._session = session
        self._max_tokens = max_tokens
        self.generated: Counter[str] = Counter()

    async def run_one(self, tenant: BenchTenant, number: int) -> None:
        """Send a request and count its tokens."""
        answer = await self._post(tenant, number)
        self.generated[tenant.name] += answer["usage"]["completion_tokens"]

    async def _post(self, tenant: BenchTenant, number: int) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {tenant.key}"} if tenant.key else {}
        body = {
            "prompt": f"Request {number} of {tenant.name}:",
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
        }
        async with self._session.post(self._url, json=body, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {answer['error']['message']}")
            return answer

    async def keep_open(self, tenant: BenchTenant, first: int, until: float) -> None:
        """Send requests one after the other until a time."""
        number = first
        while time.monotonic() < until:
            await self.run_one(tenant, number)
            number += 1000

    async def first_token_s(self, tenant: BenchTenant) -> float:
        """Return the seconds until a request of one token is answered."""
        began_at = time.monotonic()
        self._max_tokens, before = 1, self._max_tokens
        try:
            await self._post(tenant, 0)
        finally:
            self._max_tokens = before
        return time.monotonic() - began_at


async def measure_shares(
    load: TenantLoad, tenants: list[BenchTenant], concurrency: int, seconds: float
) -> dict[str, Any]:
    """Return tokens and Jain's index of tenants that all send more than their share."""
    until = time.monotonic() + seconds
    open_requests = [
        asyncio.create_task(load.keep_open(tenant, number, until))
        for tenant in tenants
        for number in range(concurrency)
    ]
    await asyncio.sleep(seconds)
    tokens = dict(load.generated)
    await asyncio.gather(*open_requests)
    shares = [tokens.get(tenant.name, 0) / tenant.weight for tenant in tenants]
    return {"tokens": tokens, "jain": round(jain_index(shares), 4)}


async def measure_lone(
    load: TenantLoad, flooder: BenchTenant, lone: BenchTenant, num_flood: int
) -> dict[str, Any]:
    """Return the seconds to the first token of one request beside many of another tenant."""
    idle_s = await load.first_token_s(lone)
    flood = [asyncio.create_task(load.run_one(flooder, number)) for number in range(num_flood)]
    await asyncio.sleep(2)
    lone_s = await load.first_token_s(lone)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    return {"flood": num_flood, "idle_s": round(idle_s, 3), "lone_s": round(lone_s, 3)}


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run what the flags ask for, and return the report."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        load = TenantLoad(arguments.url, session, arguments.max_tokens)
        if arguments.flood:
            return await measure_lone(load, arguments.key[0], arguments.key[-1], arguments.flood)
        return await measure_shares(load, arguments.key, arguments.concurrency, arguments.seconds)


def main() -> None:
    """Run the command line."""
    parser = command_parser("bench.tenants", __doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--key", type=parse_tenant, action="append", required=True, metavar="NAME=KEY:WEIGHT"
    )
    parser.add_argument("--concurrency", type=int, default=16, help="open requests of each tenant")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--flood", type=int, default=0, help="instead: requests of the first tenant"
    )
    print(json.dumps(asyncio.run(run(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
