"""Bring prompts into the form that is sent: unchanged, as token ids, or as spelled texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.cli.options import Options
from bench.load.spelling import Speller, spelled
from bench.load.tokenizing import tokenizer_of
from bench.load.workload import PlannedRequest, pretokenize
from quadriga.config.model_args import ModelArgs

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Preparation:
    """How jobs get their final form; vocab_size is None if no tokenizer was needed."""

    prepare: Callable[[Sequence[PlannedRequest]], Sequence[PlannedRequest]]
    vocab_size: int | None = None


def preparation(options: Options, served: str = "") -> Preparation:
    """Return the preparation that the options ask for, with the running server's model `served`.

    Raises ModelError or ConfigError if a tokenizer is needed and not available.
    """
    if not (options.load.pretok or options.load.spell or options.target.tokenizer):
        return Preparation(lambda jobs: jobs)
    tokenizer = tokenizer_of(options.target.tokenizer, _model(options, served))
    size = tokenizer.get_vocab_size()
    if options.load.pretok:
        return Preparation(lambda jobs: pretokenize(jobs, _encoder(tokenizer)), size)
    if options.load.spell:
        speller = Speller(tokenizer)
        return Preparation(lambda jobs: spelled(jobs, speller), size)
    return Preparation(lambda jobs: jobs, size)


def _model(options: Options, served: str) -> ModelArgs:
    if options.target.config is not None:
        return options.target.config.model
    return ModelArgs(model=options.target.model or served)


def _encoder(tokenizer: "Tokenizer") -> Callable[[str], list[int]]:
    """Return a function from text to token ids, as the frontend computes them."""
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
