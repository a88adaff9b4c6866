"""bench.embedding_quality: its texts, and what it says of vectors that differ."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.embedding_quality import NUM_NEIGHBOURS, agreement, make_texts
from tests.tiny_encoders import CONTEXT_LENGTH, tiny_bert


def test_no_two_texts_have_the_same_tokens_and_none_has_too_many(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_bert(tmp_path) / "tokenizer.json"))
    texts = make_texts(tokenizer, 100, CONTEXT_LENGTH)
    ids = [tuple(tokenizer.encode(text).ids) for text in texts]
    assert len(set(ids)) == 100
    assert all(2 < len(each) <= CONTEXT_LENGTH for each in ids)
    assert texts == make_texts(tokenizer, 100, CONTEXT_LENGTH)
    assert any(not text.isascii() for text in texts)


def test_the_text_that_differs_is_seen_in_its_cosine_and_its_neighbours() -> None:
    theirs = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    same = agreement(2 * theirs, theirs)
    assert abs(float(str(same["1 - least cosine"]))) < 1e-6
    assert same[f"texts with the same {NUM_NEIGHBOURS} nearest"] == same["in the same order"] == 40
    ours = theirs.copy()
    ours[7] = -ours[7]
    other = agreement(ours, theirs)
    assert abs(float(str(other["1 - least cosine"])) - 2) < 1e-6
    assert int(str(other[f"texts with the same {NUM_NEIGHBOURS} nearest"])) < 40
