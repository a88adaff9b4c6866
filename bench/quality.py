"""Measure the quality of number formats: `python -m bench.quality --variant "NAME: FLAGS" ...`.

Each variant of a model is compared with the same model in float32, the first row of the table:
perplexity of a text, divergence of the next-token distributions, and the length for which greedy
continuations are the same. Server flags before the variants hold for all of them. For example

    python -m bench.quality --variant "bf16: --dtype bfloat16" --variant "int8: --quantization int8"
"""

import argparse
import dataclasses
import math
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.cli.command import EXIT_OK, EXIT_USAGE, command_parser, named_flags, run_command
from bench.report.table import markdown_table
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.server.config import server_config as server_flags
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.formats.tokenizer import load_tokenizer
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import DECODE, EXTEND, NewSlot, StepPlan
from worker_proc.startup import build, devices
from worker_proc.step.inputs import make_inputs
from worker_proc.step.runner import Runner

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """Token ids: windows of the text, and prompts of one length with `continued` more tokens."""

    windows: list[list[int]]
    prompts: list[list[int]]
    continued: int


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of a variant; the reference has none of the last three.

    Attributes:
        perplexity: per token.
        continuations: greedy continuations of the prompts.
        divergence: mean KL divergence of the reference's distributions from this one's, in nats.
        agreement: share of the reference's greedy tokens that this variant would choose too.
        prefix: mean number of tokens that a continuation has in common with the reference's.
    """

    perplexity: float
    continuations: list[list[int]]
    divergence: float | None = None
    agreement: float | None = None
    prefix: float | None = None


class Surprise:
    """Sum of the negative log-probabilities of a text's tokens."""

    def __init__(self) -> None:
        self._nats, self._count = 0.0, 0

    def add(self, log_probs: Floats, followed: Sequence[int]) -> None:
        """Add log-probabilities [rows, vocab_size] with the tokens that followed the first rows."""
        chosen = log_probs[np.arange(len(followed)), np.array(followed, dtype=np.int64)]
        self._nats -= float(chosen.sum(dtype=np.float64))
        self._count += len(followed)

    def perplexity(self) -> float:
        """Return the perplexity per token."""
        return math.exp(self._nats / self._count)


def divergences(reference: Floats, other: Floats) -> npt.NDArray[np.float64]:
    """Return the KL divergences in nats, [rows], of log-probabilities [rows, vocab_size].

    Kullback and Leibler, On information and sufficiency (1951).
    """
    wide = reference.astype(np.float64)
    result: npt.NDArray[np.float64] = (np.exp(wide) * (wide - other)).sum(-1)
    return result


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens before the first different one."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(first))


# Score texts and continue prompts with one variant of a model, against the reference.
#
# The worker's own engine runs in a process of its own.

MAX_LOGIT_ROWS = 128  # computed at a time


class Scorer:
    """A model that scores one text at a time, or continues all prompts together."""

    def __init__(self, config: ServerConfig, texts: ScoredTexts) -> None:
        """Load the model, or raise QuadrigaError."""
        devices.take_cores(config.worker)
        self._texts = texts
        self._page_size = config.worker.page_size
        self._pages_per_prompt = self._pages(len(texts.prompts[0]) + texts.continued)
        rows = len(texts.prompts)
        pages = max(rows * self._pages_per_prompt, *(self._pages(len(w)) for w in texts.windows))
        pool = pages * self._page_size
        small = config.replace(max_total_tokens=pool, max_running_requests=rows)
        files = resolve_model(config.model)
        self.vocab_size = files.vocab_size
        self._runner: Runner = build.make_runner(small, files)
        self._steps = 0

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the log-probabilities of the next token at each position of a text.

        Blocks are float32, [at most MAX_LOGIT_ROWS, vocab_size].
        """
        runner, table = self._runner, self._runner.table
        table.admit([self._slot(0, ids)])
        inputs = make_inputs(self._plan(EXTEND, 1, len(ids)), table)
        hidden = runner.engine.forward(inputs)
        for block in torch.split(hidden, MAX_LOGIT_ROWS):
            yield runner.engine.logits(block).float().log_softmax(-1)
        table.release([0])

    def argmax(self, ids: Sequence[int]) -> list[int]:
        """Return the most likely next token at each position of a text."""
        return [token for block in self.log_probs(ids) for token in block.argmax(-1).tolist()]

    def continuations(self) -> list[list[int]]:
        """Return the greedy continuation of each prompt."""
        prompts, count = self._texts.prompts, self._texts.continued
        rows = len(prompts)
        new = [self._slot(slot, prompt, count) for slot, prompt in enumerate(prompts)]
        plans = [self._plan(EXTEND, rows, len(prompts[0]), new)]
        plans += [self._plan(DECODE, rows, 1) for _ in range(count - 1)]
        steps = [unpack_ids(self._runner.run(plan).token_ids) for plan in plans]
        self._runner.table.release(list(range(rows)))
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    def _slot(self, slot: int, ids: Sequence[int], num_continued: int = 0) -> NewSlot:
        first = slot * self._pages_per_prompt
        pages = pack_ids(range(first, first + self._pages(len(ids) + num_continued)))
        return NewSlot(slot, pack_ids(ids), 0, pages, 0.0, -1, 1.0, 0)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _plan(self, mode: int, rows: int, tokens: int, new: Sequence[NewSlot] = ()) -> StepPlan:
        self._steps += 1
        slots, counts = pack_ids(range(rows)), pack_ids([tokens] * rows)
        return StepPlan(self._steps, mode, slots, counts, list(new), b"")


# The whole distribution is compared at every fourth position: each takes 4 bytes per token of the
# vocabulary in a file.
COMPARED_INTERVAL = 4


def score_reference(config: ServerConfig, texts: ScoredTexts, reference_file: Path) -> Score:
    """Score the reference, and write its distributions to a file."""
    scorer = Scorer(config, texts)
    count = sum(len(window[::COMPARED_INTERVAL]) for window in texts.windows)
    shape = count, scorer.vocab_size
    file = np.lib.format.open_memmap(reference_file, mode="w+", dtype=np.float32, shape=shape)
    surprise, done = Surprise(), 0
    for block, followed, compared in _blocks(scorer, texts.windows):
        surprise.add(block, followed)
        file[done : done + len(compared)] = compared
        done += len(compared)
    return Score(surprise.perplexity(), scorer.continuations())


def score_variant(
    config: ServerConfig, texts: ScoredTexts, reference_file: Path, reference: Score
) -> Score:
    """Score a variant, with the reference's distributions and continuations."""
    scorer = Scorer(config, texts)
    distributions = np.load(reference_file, mmap_mode="r")
    surprise, diverged, done = Surprise(), 0.0, 0
    for block, followed, compared in _blocks(scorer, texts.windows):
        surprise.add(block, followed)
        diverged += divergences(distributions[done : done + len(compared)], compared).sum()
        done += len(compared)
    continuations, expected = scorer.continuations(), reference.continuations
    return Score(
        surprise.perplexity(),
        continuations,
        divergence=float(diverged / len(distributions)),
        agreement=_agreement(scorer, texts.prompts, expected),
        prefix=mean(common_prefix(a, b) for a, b in zip(continuations, expected, strict=True)),
    )


def _blocks(
    scorer: Scorer, windows: Sequence[list[int]]
) -> Iterator[tuple[Floats, list[int], Floats]]:
    """Yield blocks of log-probabilities with their next tokens and the rows to compare.

    The last position of a window has no next token.
    """
    for window in windows:
        first = 0
        for tensor in scorer.log_probs(window):
            block = tensor.numpy()
            yield (
                block,
                window[first + 1 : first + 1 + len(block)],
                block[-first % COMPARED_INTERVAL :: COMPARED_INTERVAL],
            )
            first += len(block)


def _agreement(
    scorer: Scorer, prompts: Sequence[list[int]], continuations: Sequence[list[int]]
) -> float:
    same = []
    for prompt, tokens in zip(prompts, continuations, strict=True):
        argmax = scorer.argmax(prompt + tokens)[len(prompt) - 1 : -1]
        same += [a == b for a, b in zip(argmax, tokens, strict=True)]
    return sum(same) / len(same)


MIN_PARAGRAPH_CHARACTERS = 200  # shorter ones are headings and signatures
MAX_TEXT_CHARACTERS = 40_000


def manual_prose() -> str:
    """Return the manual's longer paragraphs of plain prose, up to a length.

    Another version of Python has another text.
    """
    paragraphs = {
        " ".join(block.split()): None
        for name in sorted(topics)
        for block in topics[name].split("\n\n")
        if _is_prose(block)
    }
    text = "\n\n".join(paragraphs)
    return text[: text.find("\n\n", MAX_TEXT_CHARACTERS)]


def _is_prose(block: str) -> bool:
    """Return whether a paragraph is neither code or grammar (indented) nor cut off."""
    lines = block.splitlines()
    flush = all(not line.startswith((" ", "*", "+", "|")) for line in lines)
    return flush and len(block) >= MIN_PARAGRAPH_CHARACTERS and block.endswith(".")


MAX_WINDOW_TOKENS = 1024  # scored together; the model's context may be shorter
NUM_PROMPTS, PROMPT_TOKENS, CONTINUED_TOKENS = 32, 64, 64
REFERENCE = "float32"

T = TypeVar("T")


def run(variants: Mapping[str, ServerConfig], text: str) -> dict[str, Score]:
    """Return the scores, the reference's first.

    Every variant runs in a process of its own, so that its memory is released.
    """
    common = next(iter(variants.values()))
    texts = texts_of(resolve_model(common.model, show_progress=True), text)
    with TemporaryDirectory(prefix="quadriga-quality-") as folder:
        kept = Path(folder) / "reference.npy"
        reference = _in_new_process(REFERENCE, _score, reference_of(common), texts, kept)
        scores = {REFERENCE: reference}
        for name, config in variants.items():
            scores[name] = _in_new_process(name, _score, config, texts, kept, reference)
    return scores


def reference_of(config: ServerConfig) -> ServerConfig:
    """Return the same model in float32, without quantization."""
    worker = WorkerArgs(
        device=config.worker.device, dtype="float32", worker_threads=config.worker.worker_threads
    )
    return dataclasses.replace(config, worker=worker)


def texts_of(files: ModelFiles, text: str) -> ScoredTexts:
    """Split a text into windows and prompts; raise ConfigError if it is too short."""
    ids = load_tokenizer(files.tokenizer_dir).encode(text, add_special_tokens=False).ids
    window = min(MAX_WINDOW_TOKENS, files.context_length)
    prompt = min(PROMPT_TOKENS, window // 2)
    starts = range(0, len(ids) - prompt + 1, max(prompt, len(ids) // NUM_PROMPTS))
    if len(starts) < NUM_PROMPTS:
        raise ConfigError(
            f"the text has {len(ids)} tokens: at least {NUM_PROMPTS * prompt} are needed for"
            f" {NUM_PROMPTS} prompts; take a longer one"
        )
    return ScoredTexts(
        windows=[ids[first : first + window] for first in range(0, len(ids) - 1, window)],
        prompts=[ids[start : start + prompt] for start in starts[:NUM_PROMPTS]],
        continued=min(CONTINUED_TOKENS, files.context_length - prompt),
    )


def _in_new_process(name: str, work: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a new process; raise QuadrigaError if the process dies."""
    print(f"measuring {name}", file=sys.stderr, flush=True)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=fresh) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool:
            raise QuadrigaError(
                f"the process that measured {name} died: memory may be short; see dmesg"
            ) from None


def _score(
    config: ServerConfig, texts: ScoredTexts, kept: Path, reference: Score | None = None
) -> Score:
    """Score the reference or a variant; torch is loaded only in the process that does it."""
    if reference is None:
        return score_reference(config, texts, kept)
    return score_variant(config, texts, kept, reference)


def table(scores: Mapping[str, Score]) -> str:
    """Return the scores as a markdown table."""
    first = next(iter(scores.values()))
    prefix = f"common prefix of {len(first.continuations[0])}"
    rows = []
    for name, score in scores.items():
        change = "" if score is first else f" ({score.perplexity / first.perplexity - 1:+.2%})"
        rows.append(
            (
                name,
                f"{score.perplexity:.3f}{change}",
                "" if score.divergence is None else f"{score.divergence:.5f}",
                "" if score.agreement is None else f"{score.agreement:.1%}",
                "" if score.prefix is None else f"{score.prefix:.1f}",
            )
        )
    header = ("", "perplexity", "KL divergence, nats", "same greedy token", prefix)
    return markdown_table(header, rows)


# --- the command line -----------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> tuple[dict[str, ServerConfig], Path | None]:
    """Return the variants and the file of --text, or raise ConfigError."""
    parser = command_parser("bench.quality", __doc__)
    parser.add_argument("--variant", action="append", required=True, metavar='"NAME: FLAGS"')
    parser.add_argument("--text", type=Path, metavar="FILE", help="(default: Python's manual)")
    server_flags.add_flags(parser)
    common = parser.parse_args(argv)
    variants = {}
    for text in common.variant:
        name, flags = named_flags(text)
        variants[name] = _config_of(common, flags)
    if {config.model for config in variants.values()} != {next(iter(variants.values())).model}:
        raise ConfigError("variants are compared on one model: name it before them, once")
    return variants, common.text


def _config_of(common: Namespace, flags: list[str]) -> ServerConfig:
    parser = argparse.ArgumentParser("a variant of bench.quality", allow_abbrev=False)
    server_flags.add_flags(parser)
    of_variant = parser.parse_args(flags)
    return server_flags.from_namespace(Namespace(**{**vars(common), **vars(of_variant)}))


def _read(path: Path | None) -> str:
    if path is None:
        return manual_prose()
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code: 0 measured, 2 bad flags or no model."""
    argv = sys.argv[1:] if argv is None else argv
    return run_command("bench.quality", lambda: _main(argv), on_failure=EXIT_USAGE)


def _main(argv: Sequence[str]) -> int:
    variants, path = parse(argv)
    print(table(run(variants, _read(path))))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
