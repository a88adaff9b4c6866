"""Marks of filling in the middle are found in a vocabulary, and the prompt has their token ids."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quadriga.server.model_info import (
    ContextFile,
    FillFormat,
    fill_format_from_info,
    fill_format_to_info,
)
from tokenizer_proc.info import KNOWN_MARKS, KnownMarks, find_fill_format

VOCAB_SIZE = 1000


def tokenizer_with(*added: str, plain: tuple[str, ...] = ()) -> Tokenizer:
    """Return a byte-level tokenizer. `plain`: words of the vocabulary that are no added tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *plain]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def settings(directory: Path, **values: object) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("marks", KNOWN_MARKS, ids=lambda marks: marks.prefix)
def test_the_prompt_is_the_marks_tokens_around_those_of_the_texts(
    tmp_path: Path, marks: KnownMarks
) -> None:
    prefix, suffix, middle, suffix_first = marks
    tokenizer = tokenizer_with(*(mark for mark in (prefix, suffix, middle) if mark))
    found = find_fill_format(tokenizer, settings(tmp_path), VOCAB_SIZE)
    assert found is not None
    before = [tokenizer.token_to_id(prefix), *ids_of(tokenizer, "def f(")]
    after = [tokenizer.token_to_id(suffix), *ids_of(tokenizer, "):\n")]
    expected = after + before if suffix_first else before + after
    expected += [tokenizer.token_to_id(middle)] if middle else []
    assert ids_of(tokenizer, found.prompt("def f(", "):\n")) == expected
    assert set(found.stop_token_ids) == {
        tokenizer.token_to_id(mark) for mark in (prefix, suffix, middle) if mark
    }


def test_the_marks_of_a_gguf_are_those_of_its_header_with_the_order_of_their_family(
    tmp_path: Path,
) -> None:
    names = {"prefix": "<a>", "suffix": "<b>", "middle": "<c>", "pad": "<d>"}
    found = find_fill_format(
        tokenizer_with(*names.values()), settings(tmp_path, fill_tokens=names), VOCAB_SIZE
    )
    assert found is not None and found.prompt("x", "y") == "<a>x<b>y<c>"
    assert len(found.stop_token_ids) == 4
    names = {"prefix": "[PREFIX]", "suffix": "[SUFFIX]"}
    found = find_fill_format(
        tokenizer_with(*names.values()), settings(tmp_path, fill_tokens=names), VOCAB_SIZE
    )
    assert found is not None and found.prompt("x", "y") == "[SUFFIX]y[PREFIX]x"


def test_other_files_stand_before_the_gap_with_the_marks_that_the_model_has(tmp_path: Path) -> None:
    files = [ContextFile("a.py", "A = 1"), ContextFile("b.py", "B = 2")]
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    gap = "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    tokenizer = tokenizer_with(*qwen, "<|repo_name|>", "<|file_sep|>")
    full = find_fill_format(tokenizer, settings(tmp_path), VOCAB_SIZE)
    assert full is not None
    assert full.prompt("x", "y", files) == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n"
        f"<|file_sep|>file\n{gap}"
    )
    bare = find_fill_format(tokenizer_with(*qwen), settings(tmp_path), VOCAB_SIZE)
    assert bare is not None and bare.prompt("x", "y", files) == f"A = 1\nB = 2\n{gap}"


def test_a_vocabulary_without_all_marks_has_no_format(tmp_path: Path) -> None:
    assert (
        find_fill_format(tokenizer_with("<|fim_prefix|>"), settings(tmp_path), VOCAB_SIZE) is None
    )
    assert find_fill_format(tokenizer_with(), tmp_path / "nothing", VOCAB_SIZE) is None


def test_a_mark_that_a_text_cannot_reach_does_not_count(tmp_path: Path) -> None:
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert find_fill_format(tokenizer_with(plain=marks), settings(tmp_path), VOCAB_SIZE) is None


def test_a_format_is_the_same_after_its_way_through_the_info() -> None:
    known = FillFormat(prefix="<p>", suffix="<s>", suffix_first=True, stop_token_ids=[3])
    assert fill_format_from_info(fill_format_to_info(known)) == known
    assert fill_format_from_info(fill_format_to_info(None)) is None


def test_marks_beyond_the_models_ids_do_not_count(tmp_path: Path) -> None:
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
    tokenizer = tokenizer_with(*qwen)
    num_ids = tokenizer.get_vocab_size()
    whole = find_fill_format(tokenizer, settings(tmp_path), num_ids)
    assert whole is not None
    assert whole.stop_token_ids[-1] == num_ids - 1
    without_pad = find_fill_format(tokenizer, settings(tmp_path), num_ids - 1)
    assert without_pad is not None
    assert without_pad.stop_token_ids == whole.stop_token_ids[:-1]
    assert find_fill_format(tokenizer, settings(tmp_path), num_ids - 2) is None
