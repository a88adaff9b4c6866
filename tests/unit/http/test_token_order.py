"""The order of the tokens of several choices, and the pieces into which chunks are cut."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from http_proc.core.request_group import TokenOrder, tokens_of
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.wire.client import Usage


def end_of(index: int) -> Completion:
    return Completion("r", "", [], "stop", Usage(1, 1), Timings(0.0), index=index)


def chunk(index: int, texts: list[str], rest: str | None = None) -> StreamChunk:
    """Return a chunk of tokens with these texts; `rest` is the text of its end."""
    count = len(texts)
    made = StreamChunk(
        "r", "".join(texts) + (rest or ""), list(range(count)), [1.0] * count, 0.0, index=index
    )
    made.completion = None if rest is None else end_of(index)
    if count != 1 or rest is not None:
        made.text_lengths = [len(text) for text in texts]
    return made


def shown(pieces: Any) -> list[tuple[int, str, bool]]:
    return [(choice, piece.text, piece.completion is not None) for choice, piece in pieces]


def test_a_chunk_is_cut_into_its_tokens_and_its_end() -> None:
    pieces = list(tokens_of(chunk(0, ["a", "", "bc"], "d")))
    assert [(piece.text, len(piece.token_ids)) for piece in pieces] == [
        ("a", 1), ("", 1), ("bc", 1), ("d", 0),
    ]  # fmt: skip
    assert [piece.completion is not None for piece in pieces] == [False, False, False, True]


@pytest.mark.parametrize("num_given", range(4))
def test_given_tokens_stay_together(num_given: int) -> None:
    whole = chunk(0, ["a", "bc", "d"], "e")
    whole.token_times = [0.0] * num_given + [1.0] * (3 - num_given)
    texts = [piece.text for piece in tokens_of(whole)]
    together = [["a", "bc", "d"], ["a", "bc", "d"], ["abc", "d"], ["abcd"]]
    assert texts == [*together[num_given], "e"]


def test_a_token_alone_is_not_copied() -> None:
    whole = chunk(0, ["a"])
    assert list(tokens_of(whole)) == [whole]


def test_the_choices_take_turns_and_one_that_has_ended_is_left_out() -> None:
    order = TokenOrder(2)
    assert shown(order.push([(1, chunk(1, ["x"]))])) == []
    assert shown(order.push([(0, chunk(0, ["a"], "!"))])) == [
        (0, "a", False), (1, "x", False), (0, "!", True),
    ]  # fmt: skip
    rest = [(1, chunk(1, ["y", "z"])), (1, chunk(1, [], "?"))]
    assert shown(order.push(rest)) == [(1, "y", False), (1, "z", False), (1, "?", True)]


def arrivals(texts: list[list[str]], seed: int) -> Iterator[tuple[int, StreamChunk]]:
    """Yield the tokens and ends of choices, cut into chunks at random."""
    draw, left = random.Random(seed), [[*each] for each in texts]
    open_choices = list(range(len(texts)))
    while open_choices:
        choice = draw.choice(open_choices)
        count = draw.randint(0, len(left[choice]))
        taken, left[choice] = left[choice][:count], left[choice][count:]
        is_over = not left[choice] and draw.random() < 0.5
        if is_over:
            open_choices.remove(choice)
        if taken or is_over:
            yield choice, chunk(choice, taken, "end" if is_over else None)


@pytest.mark.parametrize("seed", range(50))
def test_the_order_depends_on_the_tokens_alone(seed: int) -> None:
    draw = random.Random(seed)
    texts = [["a" * draw.randint(0, 2)] * draw.randint(0, 5) for _ in range(draw.randint(1, 4))]
    found = set()
    for number in range(4):
        order = TokenOrder(len(texts))
        pieces = [
            piece
            for arrival in arrivals(texts, 4 * seed + number)
            for piece in order.push([arrival])
        ]
        found.add(tuple(shown(pieces)))
    assert len(found) == 1
    assert len(pieces) == sum(len(each) + 1 for each in texts)
