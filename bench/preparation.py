"""Prompts in the form in which they are sent: as they are, as token ids, or as spelled texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.cli.options import Options
from bench.load.spelling import Speller, spelled
from bench.load.tokenizing import tokenizer_of
from bench.load.workload import PlannedRequest, pretokenize
from quadriga.config.server_config import ModelArgs

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Preparation:
    """prepare: gives jobs their final form. vocab_size: None where no tokenizer is at hand."""

    prepare: Callable[[Sequence[PlannedRequest]], Sequence[PlannedRequest]]
    vocab_size: int | None = None


def preparation(options: Options, served: str = "") -> Preparation:
    """What the options ask for. served: the running server's name of its model.

    ModelError or ConfigError where that needs a tokenizer, and there is none.
    """
    if not (options.pretok or options.spell or options.tokenizer):
        return Preparation(lambda jobs: jobs)
    tokenizer = tokenizer_of(options.tokenizer, _model(options, served))
    size = tokenizer.get_vocab_size()
    if options.pretok:
        return Preparation(lambda jobs: pretokenize(jobs, _encoder(tokenizer)), size)
    if options.spell:
        speller = Speller(tokenizer)
        return Preparation(lambda jobs: spelled(jobs, speller), size)
    return Preparation(lambda jobs: jobs, size)


def _model(options: Options, served: str) -> ModelArgs:
    if options.server is not None:
        return options.server.model
    return ModelArgs(model=options.model or served)


def _encoder(tokenizer: "Tokenizer") -> Callable[[str], list[int]]:
    """Text to ids, as the front door does it."""
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
