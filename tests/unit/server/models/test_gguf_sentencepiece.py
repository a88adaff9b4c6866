"""Tokenizers of the kind "llama" give the ids of SentencePiece's own algorithm."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.server.models.formats.gguf_reader import read_header
from quadriga.server.models.formats.gguf_tokenizer import build_tokenizer, end_token_ids
from quadriga.server.models.sources import cached_builtin_weights

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
USER = ["\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "<h1>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁t", "in", "he", "▁the", "▁a", "an", "ing", "aa", "aaa", "ab", "▁thein", "ba", "tt"]
LETTERS = [SPACE, *"thienagb<1>", "é"]


def metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*SPECIAL, *USER, *BYTES, *WORDS, *LETTERS]
    words = len(WORDS) + len(LETTERS)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(SPECIAL + USER)
        + [0.0] * len(BYTES)
        + [-float(rank) for rank in range(words)],
        "tokenizer.ggml.token_type": [CONTROL] * 3
        + [UNKNOWN]
        + [USER_DEFINED] * len(USER)
        + [BYTE] * len(BYTES)
        + [NORMAL] * words,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        **changes,
    }


def sentencepiece(text: str, values: dict[str, Any]) -> list[str]:
    """Encode by SentencePiece's rules: user-defined pieces, then the best pair, then bytes."""
    scores = {
        token: score
        for token, score, kind in zip(
            values["tokenizer.ggml.tokens"],
            values["tokenizer.ggml.scores"],
            values["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == NORMAL
    }
    user = sorted((token.replace(" ", SPACE) for token in USER), key=len, reverse=True)
    text = text.replace(" ", SPACE)
    symbols: list[str] = []
    while text:
        found = next((token for token in user if text.startswith(token)), text[0])
        symbols.append(found)
        text = text[len(found) :]
    while pairs := [
        (-scores[left + right], at)
        for at, (left, right) in enumerate(pairwise(symbols))
        if left + right in scores and left not in user and right not in user
    ]:
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = scores.keys() | set(user)
    pieces: list[str] = []
    for symbol in symbols:
        as_bytes = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        pieces += [symbol] if symbol in known else as_bytes
    return pieces


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from("thienagb<1>é日🎉 \n\n  ")))
def test_ids_are_those_of_sentencepiece(text: str) -> None:
    values = metadata()
    tokenizer = build_tokenizer(values)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    expected = sentencepiece(text, values)
    assert [token.replace(" ", SPACE) for token in encoded.tokens] == expected
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_a_long_run_of_spaces_takes_the_longest_piece_first() -> None:
    tokens = build_tokenizer(metadata()).encode(" " * 9 + "the", add_special_tokens=False).tokens
    assert tokens == [SPACE * 4, SPACE * 4, "▁the"]


def test_a_prompt_begins_with_bos_and_control_tokens_are_taken_as_such() -> None:
    tokenizer = build_tokenizer(metadata())
    assert tokenizer.encode("the<eos>").tokens == ["<bos>", "t", "he", "<eos>"]
    without = build_tokenizer(metadata(**{"tokenizer.ggml.add_bos_token": False}))
    assert without.encode("the").tokens == ["t", "he"]


def test_llama_2_writes_a_space_before_a_text_and_takes_it_back() -> None:
    values = metadata()
    del values["tokenizer.ggml.add_space_prefix"]
    tokenizer = build_tokenizer(values)
    encoded = tokenizer.encode("the a")
    assert encoded.tokens == ["<bos>", "▁the", "▁a"]
    assert tokenizer.decode(encoded.ids) == "the a"


def test_a_vocabulary_without_a_tab_merges_its_byte() -> None:
    values = metadata()
    tokens = values["tokenizer.ggml.tokens"]
    tokens[tokens.index("tt")] = "\t\t"
    ids = build_tokenizer(values).encode("\t\ta\t", add_special_tokens=False).ids
    assert ids == [tokens.index("\t\t"), tokens.index("a"), tokens.index("<0x09>")]


def test_the_end_of_a_turn_ends_an_answer() -> None:
    values = metadata()
    values["tokenizer.ggml.tokens"][0] = "<end_of_turn>"
    assert end_token_ids(values) == [1, 0]


TEXTS = [
    "The capital of France is",
    "  leading and trailing  ",
    "tabs\tand\n\nnew lines \r\n  \n x",
    "12345 3.14159 1e-10 007",
    "wörld naïve Ωmega Привет 日本語 한국어 עברית 🎉👩‍👩‍👧🇩🇪",
    "<start_of_turn>user\nHi<end_of_turn>\n<h1>x</h1>",
    "def f(x):\n        return x  # code\n" * 3,
    "\u0000 control \ufeff",
]


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, Any]:
    """(Gemma 3's tokenizer as we make it, the same as transformers makes it)."""
    path = cached_builtin_weights("gemma3-270m")
    if path is None:
        pytest.skip("gemma3-270m is not in the cache; quadriga serve --model gemma3-270m")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return build_tokenizer(read_header(path).metadata), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_gemma_s_ids_are_those_of_transformers(gemma: tuple[Any, Any], text: str) -> None:
    ours, theirs = gemma
    ids = ours.encode(text).ids
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


# transformers merges more than 31 spaces, and spaces after the sign that stands for one, in another
# order than the published tokenizer.
@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters=SPACE)))
def test_gemma_s_ids_agree_on_any_text(gemma: tuple[Any, Any], text: str) -> None:
    ours, theirs = gemma
    assert ours.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("architecture", "token", "swallows"),
    [("phi3", "<eos>", True), ("phi3", "<s>", False), ("llama", "<eos>", False)],
)
def test_special_tokens_of_a_phi_3_swallow_the_spaces_after_them(
    architecture: str, token: str, swallows: bool
) -> None:
    values = metadata(**{"general.architecture": architecture})
    values["tokenizer.ggml.tokens"][0] = "<s>"
    tokenizer = build_tokenizer(values)
    spaced, joined = tokenizer.encode(f"{token} ab").ids, tokenizer.encode(f"{token}ab").ids
    assert (spaced == joined) == swallows
