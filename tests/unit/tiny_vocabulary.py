"""Vocabularies of the tiny models' tokenizer for tests of grammars."""

import json
from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from quadriga.server.grammars.grammar import load_vocabulary
from tests.tiny_models import VOCAB_SIZE

END_OF_TEXT_ID = 0


def tiny_vocabulary(directory: Path, size: int, *special_tokens: str) -> LLTokenizer:
    """Load the vocabulary of a tiny model.

    Args:
        directory: The model's directory.
        size: Number of ids.
        special_tokens: Tokens to add behind those of the model.
    """
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    for token_id, text in enumerate(special_tokens, start=VOCAB_SIZE):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": text, **flags})
    return load_vocabulary(json.dumps(tokenizer), size, frozenset({END_OF_TEXT_ID}))


def make_tokenizer() -> Tokenizer:
    tokens = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


TOKENIZER = make_tokenizer()
