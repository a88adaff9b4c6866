"""Measure forks of one long answer: `python -m bench.forks`.

A greedy answer is made, and then answered again from one of its tokens, by one request with many
choices and by as many requests at once. Reported are the seconds until each branch has its first
new token and until all have ended, the pages that were held at most, the tokens that the worker has
computed, and how many branches go on as the answer did. The last row is the same with nothing
cached. Without --endpoint the bench starts a server of its own, whose flags follow after `--`. Exit
codes: 0 all branches have gone on as the answer, 1 otherwise, 2 bad flags, 3 no server.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import serving
from bench.report.table import FigureRow, add_json_flag, show
from bench.turns import split_common
from quadriga.client import AsyncClient, Completion, SamplingParams
from quadriga.clock import now

PROMPT = "A list of things that I know about the world:"
POLL_S = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.forks", __doc__)
    parser.add_argument("--forks", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--at-token", type=int, default=4000, metavar="N",
                        help="tokens that are kept (default: 4000)")  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=16, metavar="N",
                        help="of each branch (default: 16)")  # fmt: skip
    parser.add_argument("--endpoint", metavar="tcp://HOST:PORT", help="of a running server")
    add_json_flag(parser)
    arguments = parser.parse_args(own)
    work = _run(arguments, server_flags)
    return run_command("bench.forks", lambda: run_until_signal(work))


async def _run(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    if arguments.endpoint:
        return await _measure(arguments, arguments.endpoint)
    async with serving(list(server_flags)) as (server, _):
        return await _measure(arguments, server.endpoint)


@dataclass(slots=True)
class PoolWatch:
    """Look at the pages that requests hold, as often as the server answers.

    Attributes:
        max_held: the most of them so far.
    """

    client: AsyncClient
    max_held: int = 0

    async def run(self) -> None:
        """Look until the task is cancelled."""
        while True:
            info = await self.client.info()
            self.max_held = max(self.max_held, info["pages_held"])
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _watching(client: AsyncClient) -> Any:
    watch = PoolWatch(client)
    task = asyncio.ensure_future(watch.run())
    try:
        yield watch
    finally:
        task.cancel()


async def _measure(arguments: argparse.Namespace, endpoint: str) -> int:
    at, num_new, count = arguments.at_token, arguments.new_tokens, arguments.forks
    params = SamplingParams(temperature=0, max_new_tokens=at + num_new, ignore_eos=True)
    async with AsyncClient(endpoint) as client:
        answer = await client.generate(PROMPT, params)

        async def by_choices() -> list[Completion]:
            first = await client.fork(answer, at, params, n=count)
            return [first, *first.others]

        async def by_requests() -> list[Completion]:
            return await asyncio.gather(*(client.fork(answer, at, params) for _ in range(count)))

        rows = [
            await _row(client, answer, f"1 request, n = {count}", by_choices),
            await _row(client, answer, f"{count} requests", by_requests),
        ]
        await client.flush_cache()
        rows.append(await _row(client, answer, "the same, nothing cached", by_requests))
        page_size = (await client.info())["page_size"]
    title = f"{count} forks at token {at}, {num_new} new tokens each, pages of {page_size} tokens"
    show(title, rows, arguments.json)
    return EXIT_OK if all(row["equal"] == count for row in rows) else EXIT_FAILED


async def _row(
    client: AsyncClient,
    answer: Completion,
    name: str,
    fork: Callable[[], Awaitable[list[Completion]]],
) -> FigureRow:
    """Return the figures of a number of branches."""
    before, began_at = await client.info(), now()
    async with _watching(client) as watch:
        branches = await fork()
    seconds = now() - began_at
    after = await client.info()
    first_s = [branch.timings.first_token - began_at for branch in branches]
    return {
        "forks by": name,
        "first new tokens s": max(first_s),
        "all s": seconds,
        "pages held": watch.max_held,
        "computed tokens": after["step_tokens"]["sum"] - before["step_tokens"]["sum"],
        "equal": sum(branch.token_ids == answer.token_ids for branch in branches),
    }


if __name__ == "__main__":
    sys.exit(main())
