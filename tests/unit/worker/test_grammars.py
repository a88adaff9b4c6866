"""A slot's grammar follows the text and masks the tokens that it forbids."""

from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from quadriga.sampling.params import Grammar
from quadriga.server.grammars.grammar import compile_grammar, to_library_form
from tests.unit.tiny_vocabulary import tiny_vocabulary
from worker_proc.sampling.grammar import (
    MASKED,
    Constrained,
    SlotConstraint,
    SlotGrammar,
    advance,
    mask_by_grammar,
)

VOCAB_SIZE = 515  # some more ids than the tokenizer has, and not a multiple of 8


@pytest.fixture(scope="module")
def vocabulary(llama_dir: Path) -> LLTokenizer:
    return tiny_vocabulary(llama_dir, VOCAB_SIZE)


def slot(
    vocabulary: LLTokenizer, regex: str, *generated: int, stop: int = 0, jump_forward: bool = False
) -> SlotGrammar:
    matcher = compile_grammar(vocabulary, to_library_form(Grammar("regex", regex), vocabulary))
    return SlotGrammar(matcher, np.array([stop]), np.array(generated, dtype=np.int64), jump_forward)


def ids(vocabulary: LLTokenizer, *texts: str) -> set[int]:
    return {vocabulary.tokenize_str(text)[0] for text in texts}


def allowed(*grammars: SlotConstraint) -> list[set[int]]:
    """Return the allowed tokens of rows 0, 2, 4, …; the rows between have no grammar."""
    scores = torch.zeros(2 * len(grammars), VOCAB_SIZE)
    mask_by_grammar(scores, [Constrained(2 * i, g) for i, g in enumerate(grammars)])
    assert (scores[1::2] == 0).all()
    return [set((row != MASKED).nonzero().flatten().tolist()) for row in scores[::2]]


def test_the_stop_token_may_come_only_where_the_text_may_end(vocabulary: LLTokenizer) -> None:
    (x,), (y,) = ids(vocabulary, "X"), ids(vocabulary, "Y")
    begun, may_end, over = (slot(vocabulary, "XY?", *known) for known in ([], [x], [x, y]))
    assert allowed(begun, may_end, over) == [{x}, {0, y}, {0}]


def test_a_stop_token_of_the_text_itself_ends_it_only_there_too(vocabulary: LLTokenizer) -> None:
    (x,), (y,) = ids(vocabulary, "X"), ids(vocabulary, "Y")
    assert allowed(slot(vocabulary, "[XY]X", stop=y)) == [{x}]
    assert allowed(slot(vocabulary, "[XY]X", x, x, stop=y)) == [{0, y}]


def test_tokens_known_at_the_start_and_tokens_added_later_give_the_same_state(
    vocabulary: LLTokenizer,
) -> None:
    (x,), (y,) = ids(vocabulary, "X"), ids(vocabulary, "Y")
    stayed, came_back = slot(vocabulary, "(XY){1,2}"), slot(vocabulary, "(XY){1,2}", x, y)
    assert [stayed.advance(token) for token in (x, y)] == ["", ""]
    assert allowed(stayed) == allowed(came_back) == [{0, x}]


def test_a_row_whose_token_is_barred_fails_alone(vocabulary: LLTokenizer) -> None:
    (x,), (y,) = ids(vocabulary, "X"), ids(vocabulary, "Y")
    rows = [Constrained(row, slot(vocabulary, "XX?")) for row in range(3)]
    failed = advance(rows, np.array([x, y, 0]), np.array([7, 8, 9]))
    assert [row.row for row in failed] == [8, 9]
    assert "no token is left" in failed[0].error
    assert allowed(rows[0].grammar, rows[1].grammar) == [{0, x}, set()]


def test_forced_text_becomes_the_tokens_of_the_tokenizer(vocabulary: LLTokenizer) -> None:
    (a,), (b,) = ids(vocabulary, "A"), ids(vocabulary, "B")
    jumping = slot(vocabulary, "(A|B) quick brown fox[XY]", jump_forward=True)
    assert jumping.take_forced(32) == [], "both letters are allowed"
    assert jumping.advance(a) == ""
    first, rest = jumping.take_forced(2), jumping.take_forced(32)
    assert len(first) == 2
    text = vocabulary.decode_str([*first, *rest])
    assert vocabulary.tokenize_str(text) == [*first, *rest]
    assert text and " quick brown fox".startswith(text)
    stayed = slot(vocabulary, "(A|B) quick brown fox[XY]", b, *first, *rest)
    assert allowed(jumping) == allowed(stayed)
    assert stayed.take_forced(32) == [], "jump-forward is off"


def test_nothing_is_forced_at_the_end_nor_where_it_would_end_the_text(
    vocabulary: LLTokenizer,
) -> None:
    (a,), (x,) = ids(vocabulary, "A"), ids(vocabulary, "X")
    assert slot(vocabulary, "AX", a, x, jump_forward=True).take_forced(32) == []
    assert slot(vocabulary, "(A|B)XXXX", a, stop=x, jump_forward=True).take_forced(32) == []
    failed = slot(vocabulary, "AX", jump_forward=True)
    assert failed.advance(x) != "" and failed.take_forced(32) == []
