"""What is made of a GGUF's header: refusals, and a tokenizer equal to the published one."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import ModelError
from quadriga.sampling.validation import find_unserved_tokens
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.formats.gguf_config import header_files
from quadriga.server.models.formats.gguf_tokenizer import (
    RULES,
    build_pre_tokenizer,
    build_tokenizer,
    end_token_ids,
    find_rule,
    write_tokenizer,
)
from quadriga.server.models.formats.tokenizer import (
    load_tokenizer,
    template_source,
    tool_template_source,
)
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.server.models.sources import builtin_weights
from tests.unit.tiny_gguf import BYTES, CONTROL, NORMAL, TOKENS, USER_DEFINED, write_tiny_gguf
from tokenizer_proc.preparation.prepare import sampling_defaults
from worker_proc.loading.checkpoints import from_gguf

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


@pytest.mark.parametrize("pre", RULES)
def test_every_pre_tokenizer_gives_the_text_back(tmp_path: Path, pre: str) -> None:
    import unicodedata

    tokenizer = tiny(tmp_path, pre=pre, add_bos=False)
    for text in (*TEXTS, "日本 12 ab ab\n\n  ab's"):
        ids = tokenizer.encode(text).ids
        expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


# A text, and the words of it. llama.cpp gives the same ids with a vocabulary whose merges join
# everything.
WORDS_OF = "Hello  WORLD's camelCase 12345\n\n  x=[1] 日本語カタカナ Привет/ !?\r\n\tend "
WORDS = {
    "default": "Hello| | WORLD|'|s| camelCase| |123|45|\n\n | x|=[|1|]| 日本語カタカナ| Привет|/"
    "| |!?|\r\n|\t|end| ",
    "gpt-2": "Hello| | WORLD|'s| camelCase| 12345|\n\n | x|=[|1|]| 日本語カタカナ| Привет|/| !?"
    "|\r\n|\t|end| ",
    "smollm": "Hello| | WORLD|'s| camelCase| |1|2|3|4|5|\n\n | x|=[|1|]| 日本語カタカナ| Привет|/"
    "| !?|\r\n|\t|end| ",
    "llama-bpe": "Hello| | WORLD|'s| camelCase| |123|45|\n\n| | x|=[|1|]| 日本語カタカナ| Привет|/"
    "| !?\r\n|\tend| ",
    "deepseek-r1-qwen": "Hello| | WORLD|'s| camelCase| |1|2|3|4|5|\n\n| | x|=[|1|]| 日本語カタカナ"
    "| Привет|/| !?\r\n|\tend| ",
    "tekken": "Hello| | WORLD|'s| camel|Case| |1|2|3|4|5|\n\n| | x|=[|1|]| 日本語カタカナ| Привет|/"
    "| !?\r\n|\tend| ",
    "gpt-4o": "Hello| | WORLD's| camel|Case| |123|45|\n\n| | x|=[|1|]| 日本語カタカナ| Привет|/"
    "| !?\r\n|\tend| ",
    "deepseek-llm": "Hello| | WORLD|'|s| camelCase| |12345|\n|\n| | x|=[|1|]| |日本語カタカナ"
    "| Привет|/| !?|\r|\n|\tend| ",
    "deepseek-coder": "Hello| | WORLD|'|s| camelCase| |1|2|3|4|5|\n|\n| | x|=|[|1|]| "
    "|日本語カタカナ| Привет|/| !?|\r|\n|\tend| ",
    "deepseek-v3": "Hello| | WORLD|'s| camelCase| |123|45|\n\n| | x|=[|1|]| |日本語カタカナ"
    "| Привет|/| !?\r\n|\tend| ",
    "falcon": "Hello| | WORLD|'|s| camelCase| |123|45|\n\n | x|=[|1|]| 日本語カタカナ| Привет|/"
    "| |!?|\r\n|\t|end| ",
    "viking": "Hello| | WORLD's| camelCase| |1|2|3|4|5|\n\n | x=[|1|]| 日本語カタカナ| Привет/"
    "| !?\r\n\t|end| ",
    "seed-coder": "Hello| | WORLD|'s| camelCase| |1|2|3|4|5|\n\n| | x|=[|1|]| 日本語カタカナ"
    "| Привет|/| !?|\r\n|\tend| ",
}


@pytest.mark.parametrize("pre", WORDS)
def test_a_text_has_the_words_of_its_pre_tokenizer(pre: str) -> None:
    pieces = build_pre_tokenizer(find_rule(pre)).pre_tokenize_str(WORDS_OF)
    assert "|".join(WORDS_OF[begin:end] for _, (begin, end) in pieces) == WORDS[pre]


def test_words_of_deepseek_llm_have_the_letters_that_it_knows(tmp_path: Path) -> None:
    pieces = build_pre_tokenizer(find_rule("deepseek-llm")).pre_tokenize_str(
        "a\u03a9\uab70\u0560b\uff01!c"
    )
    assert [end - begin for _, (begin, end) in pieces] == [1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("pre", [None, ""])
def test_a_header_without_a_pre_tokenizer_has_the_default_one(pre: str | None) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": ["1 2"],
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
    }
    words = build_tokenizer(metadata).pre_tokenizer.pre_tokenize_str("a1234")
    assert [word for word, _ in words] == ["a", "123", "4"]


ENDS = ["<|end|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<EOT>", "<|eom_id|>",
        "<|file_sep|>", "<fim_pad>"]  # fmt: skip


def byte_level(*tokens: str, kind: int = USER_DEFINED, **keys: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary of bytes and `tokens` of a kind."""
    vocabulary = [*BYTES, *tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [NORMAL] * len(BYTES) + [kind] * len(tokens),
        "tokenizer.ggml.merges": [],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def ends_of(metadata: dict[str, Any]) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens[token_id] for token_id in end_token_ids(metadata)]


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("token", ENDS)
def test_an_end_token_is_known_by_its_text_and_not_shown(token: str, kind: int) -> None:
    metadata = byte_level("<other>", token, kind=kind, eos_token_id=0)
    assert ends_of(metadata) == [BYTES[0], token]
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode(f"a{token}").ids
    assert tokenizer.id_to_token(ids[-1]) == token
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


@pytest.mark.timeout(30)
def test_the_end_tokens_of_a_large_vocabulary_are_found_in_one_pass() -> None:
    words = [f"word{number}" for number in range(200_000)]
    assert ends_of(byte_level(*words, "<|im_end|>", kind=NORMAL)) == ["<|im_end|>"]


@pytest.mark.parametrize(
    ("others", "no_end"),
    [
        (["<|return|>", "<|call|>"], "<|end|>"),
        (["<|calls|>", "<|flush|>"], "<|end|>"),
        (["<|tool_response>"], "</s>"),
    ],
)
def test_a_token_that_ends_answers_elsewhere_is_no_end_beside_some_others(
    others: list[str], no_end: str
) -> None:
    assert ends_of(byte_level(no_end, *others)) == others
    assert ends_of(byte_level(no_end, others[0][:-1])) == [no_end]


def test_ids_of_the_header_that_are_not_in_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    metadata = byte_level(eos_token_id=9999, bos_token_id=9999, add_bos_token=True)
    assert end_token_ids(metadata) == []
    assert len(build_tokenizer(metadata).encode("a").ids) == 1
    write_tokenizer(metadata, tmp_path)


def test_a_text_ends_with_eos_where_the_header_asks_for_it() -> None:
    keys = {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True, "add_eos_token": True}
    ids = build_tokenizer(byte_level(**keys)).encode("a").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)


def test_chat_templates_are_kept_by_their_names(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", templates={"tool_use": "T", "rag": "R"})
    directory = header_files(path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert template_source(directory, config) == "{{ messages }}"
    assert tool_template_source(directory, config) == "T"


def test_recommended_sampling_parameters_are_those_of_requests_without_them(tmp_path: Path) -> None:
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", sampling=sampling)
    config = resolve_model(ModelArgs(model=str(path))).generation_config
    defaults = sampling_defaults("model", config)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 0.95)
    assert (defaults.min_p, defaults.repetition_penalty) == (0.05, 1.05)


@pytest.mark.parametrize("given", [1, 2, 3])
def test_any_part_of_a_split_gguf_stands_for_the_whole_model(tmp_path: Path, given: int) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", output=True, max_tensors=1)
    whole = resolve_model(ModelArgs(model=str(write_tiny_gguf(tmp_path / "one.gguf", output=True))))
    files = resolve_model(ModelArgs(model=str(tmp_path / f"tiny-0000{given}-of-00003.gguf")))
    assert files.config == whole.config
    assert files.weights == tmp_path / "tiny-00001-of-00003.gguf"
    assert files.tensor_index is not None and whole.tensor_index is not None
    for name, tensor in whole_tensors(whole).items():
        assert torch.equal(whole_tensors(files)[name], tensor)
    assert resolve_model(ModelArgs(model=files.location)) == replace(files, name=files.location)


def whole_tensors(files: ModelFiles) -> dict[str, Any]:
    assert files.weights is not None and files.tensor_index is not None
    return dict(from_gguf(files.weights, files.tensor_index, files.config))


def test_a_missing_part_of_a_split_gguf_is_named(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", output=True, max_tensors=1)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(
        ModelError, match=r"of 3 parts .*, and tiny-00002-of-00003\.gguf is missing"
    ):
        resolve_model(ModelArgs(model=str(tmp_path / "tiny-00003-of-00003.gguf")))


def test_a_part_of_another_model_is_named(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", output=True, max_tensors=1)
    third = tmp_path / "tiny-00003-of-00003.gguf"
    third.write_bytes((tmp_path / "tiny-00002-of-00003.gguf").read_bytes())
    with pytest.raises(ModelError, match=r"00003\.gguf is not part 3 of 3"):
        header_files(third)


def test_a_renamed_part_is_refused_with_the_name_that_it_should_have(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", output=True, max_tensors=1)
    renamed = (tmp_path / "tiny-00001-of-00003.gguf").rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"one of 3 parts .* NAME-00001-of-00003\.gguf"):
        header_files(renamed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.scale", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 12.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("residual_scale", 0.25),
        ("rope.scaling.alpha", 1000.0),
        ("attention.value_length", 4.0),
        ("rope.dimension_count", 4.0),
    ],
)
def test_a_key_that_would_change_the_logits_is_refused_by_name(
    tmp_path: Path, key: str, value: float
) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", keys={key: value})
    with pytest.raises(ModelError, match=rf"llama\.{key} = {value} is not supported.*supported:"):
        header_files(path)


def test_values_that_change_nothing_are_no_reason_to_refuse_a_model(tmp_path: Path) -> None:
    keys = {"attention.causal": True, "logit_scale": 1.0, "attention.sliding_window": 0.0}
    assert header_files(write_tiny_gguf(tmp_path / "tiny.gguf", keys=keys)).is_dir()


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", keys={"attention.sliding_window": 16})
    files = resolve_model(ModelArgs(model=str(path)))
    assert read_architecture(files.config).windows == (16,)


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


def resolved(path: Path) -> ModelFiles:
    return resolve_model(ModelArgs(model=str(path)))


@pytest.mark.parametrize(("rows", "head_rows", "num_ids"), [(260, 260, 260), (264, 261, 261)])
def test_the_model_has_the_ids_that_embedding_and_head_have(
    rows: int, head_rows: int, num_ids: int, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", output=True, rows=rows, head_rows=head_rows)
    files = resolved(path)
    assert files.vocab_size == num_ids < len(TOKENS)
    unserved = find_unserved_tokens(load_tokenizer(files.tokenizer_dir), num_ids)
    assert unserved.texts == dict(enumerate(TOKENS[num_ids:], num_ids))


def test_special_tokens_that_are_not_in_the_list_are_left_out(tmp_path: Path) -> None:
    ids = {"eot": 77777, "padding": 2**32 - 1, "unknown": len(TOKENS)}
    files = resolved(write_tiny_gguf(tmp_path / "tiny.gguf", eos=99999, ids=ids))
    assert files.eos_token_ids == {1, 2}
    assert "eos_token_id names 99999" in files.notes[0]
    settings = json.loads((files.tokenizer_dir / "tokenizer_config.json").read_text())
    assert settings["bos_token"] == "<|im_start|>"
    assert not {"eos_token", "pad_token", "unk_token"} & settings.keys()
