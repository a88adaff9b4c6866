"""What is made of a GGUF's header: refusals, and a tokenizer equal to the published one."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import ModelError
from quadriga.model_files.builtin.fetch import builtin_weights
from quadriga.model_files.gguf_header import header_files
from quadriga.model_files.tokenizer import load_tokenizer
from tests.unit.tiny_gguf import TOKENS, write_tiny_gguf

TEXTS = [
    "",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\n\nnew lines \r\n  \n x",
    "12345 3.14159 1e-10 007 a1b2",
    "I'll, don't, we've, THEY'RE",
    "wörld naïve Ωmega Привет 日本語 한국어 עברית",
    "emoji 🎉👩‍👩‍👧🇩🇪 and \u200d joiners \ufeff",
    "\u0000 control \u0007 \x7f",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b<repo_name>c",
    "<|im_start|",
    "def f(x):\n    return x  # code\n" * 3,
]


@pytest.fixture(autouse=True)
def own_cache(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if "published" not in request.fixturenames:
        monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def published() -> tuple[Any, Any]:
    """(the built-in's tokenizer as we make it, the same as transformers makes it)."""
    transformers = pytest.importorskip("transformers")
    try:
        path = builtin_weights(show_progress=False)
    except ModelError as error:
        pytest.skip(str(error))
    ours = load_tokenizer(header_files(path))
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return ours, theirs


def tiny(tmp_path: Path, **overrides: Any) -> Any:
    return load_tokenizer(header_files(write_tiny_gguf(tmp_path / "tiny.gguf", **overrides)))


def test_the_builtins_tokenizer_is_the_published_one(published: tuple[Any, Any]) -> None:
    ours, theirs = published
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special_tokens=skip) == expected


# transformers leaves the split of digits out when it reads a GGUF, which matters for numbers
# outside ASCII only: no merge joins ASCII digits.
@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Nd", "Nl", "No")) | st.sampled_from("019")))
def test_the_builtins_tokenizer_agrees_on_any_text(published: tuple[Any, Any], text: str) -> None:
    ours, theirs = published
    assert ours.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("pre", ["smollm", "refact"])
def test_some_take_every_digit_by_itself(tmp_path: Path, pre: str) -> None:
    split = tiny(tmp_path, pre=pre).encode("a12").tokens
    assert split == ["a", "1", "2"]
    joined = tiny(tmp_path, pre="gpt-2").encode("a12").tokens
    assert joined == ["a", "12"]


@pytest.mark.parametrize(
    "pre", ["smollm", "refact", "starcoder", "gpt-2", "default", "llama-bpe", "dbrx", "qwen2"]
)
@pytest.mark.parametrize("text", [*TEXTS, "日本 12 ab ab\n\n  ab's"])
def test_every_pre_tokenizer_gives_the_text_back(tmp_path: Path, pre: str, text: str) -> None:
    import unicodedata

    tokenizer = tiny(tmp_path, pre=pre, add_bos=False)
    ids = tokenizer.encode(text).ids
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_special_tokens_are_skipped_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path)
    ids = tokenizer.encode("<|im_start|>a<user-defined>").ids
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "a", "<user-defined>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<user-defined>"


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"add_bos": True}, TOKENS[0]),
        ({"add_bos": False}, "a"),
        ({}, "a"),
        ({"pre": "llama-bpe"}, TOKENS[0]),
    ],
)
def test_the_header_says_whether_a_text_begins_with_bos(
    tmp_path: Path, options: dict[str, Any], first: int | None
) -> None:
    assert tiny(tmp_path, **options).encode("a").tokens[0] == first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "mamba"}, "supported: llama, qwen2, qwen3, gpt2, gemma2"),
        ({"pre": "kimi-k2"}, "'kimi-k2' is not known"),
        ({"kind": "t5"}, "Hugging Face directory"),
        ({"scaling": "su"}, "rope.scaling.type = 'su' is not supported; supported: none, linear"),
        ({"scaling": "longrope"}, "no rope_factors_long.weight"),
    ],
)
def test_unsupported_gguf_options_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(ModelError, match=said):
        header_files(path)


@pytest.mark.parametrize("kept", [8, 100, 3000])
def test_a_gguf_cut_short_is_named(tmp_path: Path, kept: int) -> None:
    path = write_tiny_gguf(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        header_files(cut)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ModelError, match="not a GGUF"):
        header_files(path)


def test_starts_at_the_same_time_do_not_break_each_other(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = []
    threads = [threading.Thread(target=lambda: found.append(header_files(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    load_tokenizer(found[0])
    assert [entry.name for entry in found[0].parent.parent.iterdir()] == ["gguf-headers"]


@pytest.mark.parametrize(
    "names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")]
)
def test_the_headers_tokens_for_filling_in_the_middle_are_kept_by_name(
    tmp_path: Path, names: tuple[str, str, str]
) -> None:
    ids = dict(zip(names, (0, 2, 3), strict=True))
    directory = header_files(write_tiny_gguf(tmp_path / "tiny.gguf", fill=ids))
    settings_of_tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings_of_tokenizer["fill_tokens"] == {
        "prefix": TOKENS[0],
        "suffix": TOKENS[2],
        "middle": TOKENS[3],
    }
