"""Compare the vectors of texts with those of sentence-transformers, text by text.

    python -m bench.embedding_quality --library-python VENV/bin/python
    python -m bench.embedding_quality -- --dtype float32           # flags of our server

Texts have 1 to `--max-tokens` tokens of the model: English words, other scripts, emoji, and words
without a letter. The cosine of both vectors of a text should be 1, and the texts whose vectors are
nearest to it should be the same. sentence-transformers computes in float32.
"""

import argparse
import asyncio
import base64
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.cli.command import EXIT_OK, command_parser, run_command, run_until_signal
from bench.client.server import serving
from bench.embeddings import LIBRARY, MODEL, TEXTS_OF_REQUEST, checkpoint_of
from bench.report.table import Value, add_json_flag, show
from bench.turns import split_common
from quadriga.client import AsyncClient
from quadriga.errors import ConfigError

NUM_NEIGHBOURS = 10
OTHER_WORDS = (
    "погода хорошая сегодня дождь и ветер", "东京 是 日本 的 首都", "明日 は 雨 です", "오늘 날씨",
    "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "καλημέρα κόσμε", "ça façade naïve Straße",
    "😀 🐎🐎🐎🐎 👩‍👩‍👧 🇫🇷", "… — « » ¿ ?", "x=1; y += 2**8", "\u200b \u00a0", "İstanbul ﬁn ①",
)  # fmt: skip
EMPTY_WORDS = ("", " ", "\t", "\n")

Floats = npt.NDArray[np.float32]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison of a command line, and return the exit code."""
    own, server_flags = split_common(sys.argv[1:] if argv is None else argv)
    parser = command_parser("bench.embedding_quality", __doc__)
    parser.add_argument("--model", default=MODEL, help=f"(default: {MODEL})")
    parser.add_argument("--num-texts", type=int, default=1000, metavar="N",
                        help="(default: 1000)")  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N",
                        help="of a text, with added ones (default: 256)")  # fmt: skip
    parser.add_argument("--library-python", default=sys.executable, metavar="PYTHON",
                        help=f"the Python that has {LIBRARY} (default: this one)")  # fmt: skip
    add_json_flag(parser)
    parser.add_argument("--library", metavar="DIRECTORY", help=argparse.SUPPRESS)
    arguments = parser.parse_args(own)
    if arguments.library:
        return _run_library(arguments.library)
    work = _compare(arguments, server_flags)
    return run_command("bench.embedding_quality", lambda: run_until_signal(work))


async def _compare(arguments: argparse.Namespace, server_flags: Sequence[str]) -> int:
    directory, tokenizer = checkpoint_of(arguments.model)
    texts = make_texts(tokenizer, arguments.num_texts, arguments.max_tokens)
    theirs = await _library_vectors(arguments.library_python, directory, texts)
    flags = ["--model", arguments.model, *server_flags]
    async with serving(flags) as (own, info), AsyncClient(own.endpoint) as client:
        answers = await client.embed(texts)
    ours = np.array([answer.vector for answer in answers], dtype=np.float32)
    title = f"vectors of {arguments.model} in {info['dtype']} beside {LIBRARY} in float32"
    show(title, [agreement(ours, theirs)], arguments.json)
    return EXIT_OK


def make_texts(tokenizer: Tokenizer, count: int, max_tokens: int, seed: int = 0) -> list[str]:
    """Return texts of which no two have the same tokens, the shortest lengths more often.

    Args:
        tokenizer: of the model.
        count: number of texts.
        max_tokens: of a text, with those that the tokenizer adds.
        seed: of the draws.
    """
    draw = random.Random(seed)
    english = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.isascii())
    others = [word for line in OTHER_WORDS for word in line.split()]
    num_added = len(tokenizer.encode("").ids)
    texts: dict[tuple[int, ...], str] = {}
    while len(texts) < count:
        wanted = int(max_tokens ** draw.random())
        words: list[str] = []
        share = draw.choice((0.0, 0.0, 0.2, 1.0))  # of words that are not English
        for _ in range(wanted):
            words.append(draw.choice(others if draw.random() < share else english))
            if draw.random() < 0.05:
                words.append(draw.choice(EMPTY_WORDS))
        while len(words) > 1 and len(tokenizer.encode(" ".join(words)).ids) > max_tokens:
            words.pop()
        ids = tuple(tokenizer.encode(" ".join(words)).ids)
        if num_added < len(ids) <= max_tokens:
            texts.setdefault(ids, " ".join(words))
    return list(texts.values())


def agreement(ours: Floats, theirs: Floats) -> dict[str, Value]:
    """Return how far two sets of vectors `[texts, dimensions]` of the same texts agree."""
    ours, theirs = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (ours, theirs))
    cosines = (ours.astype(np.float64) * theirs).sum(1)
    mine, other = _neighbours(ours), _neighbours(theirs)
    same = [len(set(a) & set(b)) for a, b in zip(mine.tolist(), other.tolist(), strict=True)]
    return {
        "texts": len(ours),
        "1 - least cosine": float(1 - cosines.min()),
        "largest error": float(np.abs(ours - theirs).max()),
        f"texts with the same {NUM_NEIGHBOURS} nearest": sum(n == NUM_NEIGHBOURS for n in same),
        "in the same order": int((mine == other).all(1).sum()),
        "same neighbours in %": 100 * sum(same) / (NUM_NEIGHBOURS * len(ours)),
    }


def _neighbours(vectors: Floats) -> npt.NDArray[np.int64]:
    """Return the numbers of the nearest other vectors of each, the nearest first."""
    wide = vectors.astype(np.float64)
    scores = wide @ wide.T
    np.fill_diagonal(scores, -np.inf)
    return np.argsort(-scores, axis=1, kind="stable")[:, :NUM_NEIGHBOURS]


async def _library_vectors(python: str, directory: Path, texts: Sequence[str]) -> Floats:
    """Return the library's vectors. Raise ConfigError if the library is not there."""
    process = await asyncio.create_subprocess_exec(
        python, "-m", "bench.embedding_quality", "--library", str(directory),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    out, _ = await process.communicate(json.dumps(texts).encode())
    if process.returncode:
        raise ConfigError(
            f"{LIBRARY} did not run (its message is above): name a Python that has it by"
            " --library-python"
        )
    values = np.frombuffer(base64.b64decode(out.splitlines()[-1]), dtype="<f4")
    return values.reshape(len(texts), -1)


def _run_library(directory: str) -> int:
    """Print the library's vectors of the texts on standard input, as base64 of float32."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(directory, device="cpu")
    texts = json.load(sys.stdin)
    vectors = model.encode(texts, batch_size=TEXTS_OF_REQUEST, show_progress_bar=False)
    print(base64.b64encode(np.asarray(vectors, dtype="<f4").tobytes()).decode(), flush=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
