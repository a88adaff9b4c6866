"""Train a LoRA adapter of the built-in model on the pages of docs/: a real one to serve.

    python -m bench.train_adapter /tmp/docs-adapter       # needs transformers and peft
    quadriga serve --lora-modules docs=/tmp/docs-adapter

After --steps steps the model continues a line of the documentation in the documentation's words.
Printed are the loss of text that was not trained on, before and after.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli.command import EXIT_OK, command_parser, run_command
from quadriga.errors import ConfigError
from quadriga.programs import install_command
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.resolve import resolve_model

if TYPE_CHECKING:
    import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"
LENGTH = 256  # tokens of a training text
LEARNING_RATE = 5e-4
TESTED_PAGES = ("reliability.md", "kv-cache.md")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    parser = command_parser("bench.train_adapter", __doc__)
    parser.add_argument("directory", type=Path, help="where the adapter is written")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--rank", type=int, default=16, metavar="R", help="(default: 16)")
    arguments = parser.parse_args(argv)
    return run_command("bench.train_adapter", lambda: train(arguments))


def train(arguments: argparse.Namespace) -> int:
    """Train, and write the adapter.

    Raises:
        ConfigError: a package is missing.
    """
    try:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {install_command('test')}") from None

    files = resolve_model(ModelArgs())
    assert files.weights is not None
    source = {
        "pretrained_model_name_or_path": str(files.weights.parent),
        "gguf_file": files.weights.name,
    }
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    base = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = LoraConfig(
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, settings)
    pages = sorted(DOCS.glob("*.md"))
    trained = _texts(tokenizer, [page for page in pages if page.name not in TESTED_PAGES])
    tested = _texts(tokenizer, [page for page in pages if page.name in TESTED_PAGES])[:8]
    optimizer = torch.optim.AdamW(
        (weight for weight in model.parameters() if weight.requires_grad), lr=LEARNING_RATE
    )
    before, order = _loss(model, tested), random.Random(0)
    for step in range(arguments.steps):
        ids = order.choice(trained)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    after = _loss(model, tested)
    model.save_pretrained(str(arguments.directory))
    print(
        f"perplexity of {', '.join(TESTED_PAGES)}: {math.exp(before):.1f} before,"
        f" {math.exp(after):.1f} after; {arguments.directory} has the adapter"
    )
    return EXIT_OK


def _texts(tokenizer: "object", pages: Sequence[Path]) -> "list[torch.Tensor]":
    """Return the pages as token ids [1, LENGTH] each."""
    import torch

    ids = [i for page in pages for i in tokenizer(page.read_text())["input_ids"]]  # type: ignore[operator]
    count = len(ids) // LENGTH
    return list(torch.tensor(ids[: count * LENGTH]).view(count, 1, LENGTH))


def _loss(model: "torch.nn.Module", texts: "list[torch.Tensor]") -> float:
    """Return the mean loss of texts."""
    import torch

    with torch.no_grad():
        losses = [float(model(input_ids=ids, labels=ids).loss) for ids in texts]
    return sum(losses) / len(losses)


if __name__ == "__main__":
    sys.exit(main())
