"""Compare how many texts a second become vectors: Quadriga and others, in turns.

    python -m bench.embeddings --library-python VENV/bin/python
    python -m bench.embeddings --server llama.cpp=http://127.0.0.1:8081 --lengths 16 128
    python -m bench.embeddings -- --dtype float32                  # flags of our server

Quadriga serves the model of `--model` with the flags after `--`, and answers `/v1/embeddings`; so
do servers named by `--server`, which must run already, with the same model. sentence-transformers
is called as a library, without a server. Texts are random words, cut to a number of tokens; each
request has 32, and a server gets four requests at a time. A figure is texts per second, the median
of the turns; while one is measured, Quadriga's processes are stopped unless it is Quadriga.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from bench.cli.command import EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import OwnServer, free_port, serving
from bench.report.table import Value, add_json_flag, show
from bench.turns import split_common
from quadriga.errors import ConfigError
from quadriga.server.config import engine_args
from quadriga.server.models.resolve import resolve_model

TEXTS_OF_REQUEST, REQUESTS_AT_ONCE = 32, 4
MODEL = "all-minilm-l6-v2"
LIBRARY = "sentence-transformers"

Texts = list[str]
# Returns the seconds in which all texts have become vectors.
Embed = Callable[[Texts], Awaitable[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison of a command line, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.embeddings", __doc__)
    parser.add_argument("--model", default=MODEL, help=f"(default: {MODEL})")
    parser.add_argument("--lengths", type=int, nargs="+", default=(16, 128, 256), metavar="TOKENS",
                        help="of a text (default: 16 128 256)")  # fmt: skip
    parser.add_argument("--num-texts", type=int, default=512, metavar="N",
                        help="of a turn (default: 512)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL",
                        help="a server with OpenAI's API to compare with")  # fmt: skip
    parser.add_argument("--library-python", default=sys.executable, metavar="PYTHON",
                        help=f"the Python that has {LIBRARY} (default: this one)")  # fmt: skip
    add_json_flag(parser)
    parser.add_argument("--library", metavar="DIRECTORY", help=argparse.SUPPRESS)
    arguments = parser.parse_args(own)
    if arguments.library:
        return _serve_library(arguments.library)
    work = _compare(arguments, server_flags)
    return run_command("bench.embeddings", lambda: run_until_signal(work))


async def _compare(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    directory, tokenizer = checkpoint_of(arguments.model)
    flags, port = ["--model", arguments.model, *server_flags], free_port()
    async with serving(flags, port) as (own, info), AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        library = stack.enter_context(_Library(arguments.library_python, directory))
        ways: dict[str, Embed] = {
            "quadriga": _by_http(session, f"http://127.0.0.1:{port}", arguments.model),
            LIBRARY: library.embed,
        }
        for named in arguments.server:
            name, _, url = named.partition("=")
            ways[name] = _by_http(session, url, name)
        rows = [
            await _rates(ways, own, tokenizer, length, arguments) for length in arguments.lengths
        ]
    formats = f"quadriga in {info['dtype']}, {LIBRARY} in float32"
    show(f"texts/s, {arguments.model}; {formats}", rows, arguments.json)
    return EXIT_OK


def checkpoint_of(model: str) -> tuple[Path, Tokenizer]:
    """Return the directory of a model's weights, and its tokenizer, which cuts no text."""
    files = resolve_model(engine_args.ModelArgs(model=model), show_progress=True)
    assert files.weights is not None
    tokenizer = Tokenizer.from_file(str(files.tokenizer_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    return files.weights, tokenizer


async def _rates(
    ways: dict[str, Embed],
    own: OwnServer,
    tokenizer: Tokenizer,
    length: int,
    arguments: argparse.Namespace,
) -> dict[str, Value]:
    """Return the texts per second of each way, and the ratios of ours to the others."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, arguments.turns):  # the first one warms up
        texts = _texts(tokenizer, length, arguments.num_texts, seed=turn)
        for name in ways if turn % 2 else reversed(ways):
            (own.resume if name == "quadriga" else own.pause)()
            seconds = await ways[name](texts)
            if turn >= 0:
                rates[name].append(len(texts) / seconds)
    own.resume()
    row: dict[str, Value] = {"tokens": length}
    row |= {name: statistics.median(values) for name, values in rates.items()}
    for name in list(ways)[1:]:
        pairs = zip(rates["quadriga"], rates[name], strict=True)
        row[f"quadriga / {name}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return row


def _texts(tokenizer: Tokenizer, length: int, count: int, seed: int) -> Texts:
    """Return texts of random words, of `length` tokens with the two that the model adds."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.islower())
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=max(1, length - 2))) for _ in range(count)]


def _by_http(session: aiohttp.ClientSession, url: str, model: str) -> Embed:
    """Return what embeds texts by the API of OpenAI."""

    async def one(batch: Texts, limit: asyncio.Semaphore) -> None:
        body = {"model": model, "input": batch, "encoding_format": "base64"}
        async with limit, session.post(f"{url}/v1/embeddings", json=body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise ConfigError(f"{url} answered {response.status}: {str(answer)[:200]}")

    async def embed(texts: Texts) -> float:
        limit = asyncio.Semaphore(REQUESTS_AT_ONCE)
        began = time.perf_counter()
        await asyncio.gather(*(one(batch, limit) for batch in _batches(texts)))
        return time.perf_counter() - began

    return embed


def _batches(texts: Texts) -> list[Texts]:
    return [texts[i : i + TEXTS_OF_REQUEST] for i in range(0, len(texts), TEXTS_OF_REQUEST)]


class _Library:
    """sentence-transformers in a process of its own, with the cores that servers have."""

    def __init__(self, python: str, directory: Path) -> None:
        command = [python, "-m", "bench.embeddings", "--library", str(directory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip

    def __enter__(self) -> "_Library":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    async def embed(self, texts: Texts) -> float:
        """Return the seconds of a call, or raise ConfigError if the library is not there."""
        return await asyncio.to_thread(self._ask, texts)

    def _ask(self, texts: Texts) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(texts) + "\n")
            self._process.stdin.flush()
            return float(self._process.stdout.readline())
        except (OSError, ValueError):
            raise ConfigError(
                f"{LIBRARY} did not run (its message is above): name a Python that has it by"
                " --library-python"
            ) from None


def _serve_library(directory: str) -> int:
    """Answer each line of texts with the seconds in which the library has embedded them."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(directory, device="cpu")
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        model.encode(texts, batch_size=TEXTS_OF_REQUEST, show_progress_bar=False)
        print(time.perf_counter() - began, flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
