"""Tokenizers of the kind "llama": SentencePiece's byte-pair encoding, with byte fallback.

A GGUF has the pieces with their scores, and no merges. They are made as transformers makes those of
a tokenizer.json: the pair that gives the piece with the highest score is merged first.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from quadriga.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
# Values of tokenizer.ggml.token_type.
NORMAL, USER_DEFINED = 1, 4
# Tokens of a Phi-3 that keep the spaces after them; its other special tokens swallow these. A GGUF
# does not say so; llama.cpp has the same list.
PHI3_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")

Merge = tuple[str, str]


def build_sentencepiece_tokenizer(
    metadata: Mapping[str, Any], control: Collection[int]
) -> "Tokenizer":
    """Build a tokenizer that gives the ids of the model's published tokenizer.json.

    Args:
        metadata: The GGUF's.
        control: Ids of tokens that no answer shows.

    Raises:
        ModelError: the vocabulary has no unknown token, or no scores.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens = _pieces(metadata["tokenizer.ggml.tokens"])
    types, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    if not len(tokens) == len(types) == len(scores):
        raise ModelError(
            f"the GGUF's vocabulary has {len(tokens)} tokens, {len(types)} types and {len(scores)}"
            " scores; make the file again from the model's Hugging Face directory"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocabulary,
        list(_merges(tokens, types, scores, vocabulary)),
        unk_token=tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    escape: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    unescape: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        escape.insert(0, normalizers.Prepend(SPACE))
        unescape.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(escape)
    tokenizer.decoder = decoders.Sequence(unescape)
    strips = metadata.get("general.architecture") == "phi3"
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=token_id in control,
                normalized=False,
                rstrip=strips and token not in PHI3_KEEP_SPACES,
            )
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if token_id in control or kind == USER_DEFINED
        ]
    )
    return tokenizer


def _pieces(tokens: list[str]) -> list[str]:
    """Return the tokens as SentencePiece spells them.

    Converters write spaces for a user-defined run of them. Old Gemma models have no tab, and their
    byte 9 stands for it in merges.
    """
    pieces = [token.replace(" ", SPACE) for token in tokens]
    if "\t" not in tokens and "<0x09>" in tokens:
        pieces[tokens.index("<0x09>")] = "\t"
    return pieces


def _merges(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: Mapping[str, int]
) -> Iterator[Merge]:
    """Yield the pairs that give a token, those of the highest score first."""
    ranked = [
        # SentencePiece never splits what the user defined, whatever score the converter writes.
        (-math.inf if kind == USER_DEFINED else -score, token)
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if len(token) > 1 and kind in (NORMAL, USER_DEFINED)
    ]
    ranked.sort(key=itemgetter(0))
    for _, entries in groupby(ranked, key=itemgetter(0)):
        pairs = [
            (token[:middle], right)
            for _, token in entries
            for middle in range(len(token) - 1, 0, -1)
            if (right := token[middle:]) in vocabulary and token[:middle] in vocabulary
        ]
        # Of equal scores the longest left side is first; the pairs of one token are in this order.
        pairs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        yield from pairs
