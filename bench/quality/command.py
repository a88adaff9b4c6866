"""Measure the quality of number formats: `python -m bench.quality --variant "NAME: FLAGS" ...`.

Each variant of a model is compared with the same model in float32, the first row of the table:
perplexity of a text, divergence of the next-token distributions, and the length for which greedy
continuations are the same. Server flags before the variants hold for all of them. For example

    python -m bench.quality --variant "bf16: --dtype bfloat16" --variant "int8: --quantization int8"
"""

import argparse
import dataclasses
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from bench.cli.command import EXIT_OK, EXIT_USAGE, command_parser, named_flags, run_command
from bench.quality.metrics import Score, ScoredTexts
from bench.report.table import markdown_table
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.server.config import server_config as server_flags
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.formats.tokenizer import load_tokenizer
from quadriga.server.models.resolve import ModelFiles, resolve_model

# A text that is on every machine: the prose of Python's reference manual.

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
    from bench.quality.measure import score_reference, score_variant

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
