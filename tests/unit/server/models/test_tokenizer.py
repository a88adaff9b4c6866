"""Special tokens that the files beside tokenizer.json name are those of transformers' tokenizer."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quadriga.errors import ModelError
from quadriga.server.models.formats.tokenizer import (
    end_token_id,
    load_tokenizer,
    special_tokens,
    template_source,
    tokenizer_json,
    tool_template_source,
)
from quadriga.server.models.resolve import ModelFiles

TEXTS = ["<|a|>", "<|b|>", "<|c|>", "[MASK]", "</s>", "<s>", "<img>", "word", "Wo rd", "é", "▁x"]
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def write_tokenizer(directory: Path, *added: AddedToken, lowercase: bool = False) -> int:
    """Write a tokenizer.json of single bytes. Return the number of its tokens."""
    directory.mkdir(exist_ok=True)
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(json.dumps(content))


def check_equal(directory: Path, text: str) -> None:
    """Compare tokens, ids and texts with those of transformers."""
    ours, theirs = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    added, expected = ours.get_added_tokens_decoder(), theirs.added_tokens_decoder
    assert list(map(repr, added.values())) == list(map(repr, expected.values()))
    assert list(added) == list(expected)
    assert special_tokens(directory).texts == theirs.special_tokens_map
    assert end_token_id(directory) == theirs.eos_token_id
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False).ids == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip)
    for_grammars = Tokenizer.from_str(tokenizer_json(directory)).get_added_tokens_decoder()
    assert {i: str(token) for i, token in for_grammars.items()} == {
        i: str(token) for i, token in added.items()
    }


TYPED = {"__type": "AddedToken"}
LATER = {"content": "<|b|>", "lstrip": True, "special": True, "normalized": False}
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tokens by id": {"added_tokens_decoder": {"300": LATER, "257": {"content": "<|a|>"}}},
    "an id of another token": {"added_tokens_decoder": {"65": LATER}},
    "other flags": {"added_tokens_decoder": {"256": {"content": "</s>", "rstrip": True}}},
    "older list": {"additional_special_tokens": ["<|a|>", "<|b|>"]},
    "list": {"extra_special_tokens": ["<|a|>", {**TYPED, "content": "<|c|>", "rstrip": True}]},
    "both lists": {"extra_special_tokens": ["<|a|>"], "additional_special_tokens": ["<|b|>"]},
    "empty list": {"extra_special_tokens": [], "additional_special_tokens": ["<|b|>"]},
    "map": {"extra_special_tokens": {"image_token": "<img>"}, "additional_special_tokens": ["é"]},
    "text": {"eos_token": "<|c|>", "bos_token": None},
    "typed": {"eos_token": {**TYPED, "content": "<|c|>", "lstrip": True, "normalized": True}},
    "own names": {"boi_token": "<|b|>", "image_token": {**TYPED, "content": "<img>"}, "a_token": 1},
    "a token that has a name": {
        "eos_token": "</s>",
        "added_tokens_decoder": {"256": {"content": "</s>", "special": False}},
    },
    "split": {"eos_token": "</s>", "split_special_tokens": True},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_the_settings_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, AddedToken("</s>", special=True))
    write(tmp_path, "tokenizer_config.json", CASES[name])
    check_equal(tmp_path, "a <|a|> b<|b|>  <|c|>c</s>d <img>é")


def test_older_files_count_where_the_settings_have_no_tokens_by_id(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, AddedToken("</s>"))
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|a|>", "pad_token": "<s>"})
    named = {"eos_token": {"content": "<|b|>", "lstrip": True}, "image_token": "<img>"}
    write(tmp_path, "special_tokens_map.json", named | {"additional_special_tokens": ["[MASK]"]})
    write(tmp_path, "added_tokens.json", {"<|b|>": 258, "<|c|>": 257, "[MASK]": 259})
    text = "x <|b|>[MASK]</s><|c|> <|a|><s><img>"
    check_equal(tmp_path, text)
    later = shutil.copytree(tmp_path, tmp_path / "later")
    write(later, "tokenizer_config.json", {"added_tokens_decoder": {"256": LATER}})
    check_equal(later, text)


@pytest.mark.parametrize("seed", range(60))
def test_random_settings_give_the_tokens_of_transformers(tmp_path: Path, seed: int) -> None:
    """Texts occur once in each file: of two entries of one text the library decides by chance."""
    draw = random.Random(seed)

    def texts(most: int) -> list[str]:
        return draw.sample(TEXTS, draw.randrange(most + 1))

    def token(text: str, **fields: Any) -> Any:
        names = FLAGS if draw.random() < 0.6 else draw.sample(FLAGS, 2)
        return fields | {"content": text, **{name: draw.random() < 0.4 for name in names}}

    def either(text: str, **fields: Any) -> Any:
        return text if draw.random() < 0.6 else token(text, **fields)

    flags = [AddedToken(**token(text)) for text in texts(3)]
    size = write_tokenizer(tmp_path, *flags, lowercase=draw.random() < 0.4)
    config: dict[str, Any] = {
        name: either(text, **TYPED) for name, text in zip(NAMES, texts(6), strict=False)
    }
    if draw.random() < 0.5:
        ids = draw.sample(range(size - 4, size + 12), 11)
        config["added_tokens_decoder"] = {
            str(i): token(text) for i, text in zip(ids, texts(5), strict=False)
        }
    extra = draw.choice(["additional_special_tokens", "extra_special_tokens"])
    config[extra] = [either(text, **TYPED) for text in texts(2) if text not in config.values()]
    write(tmp_path, "tokenizer_config.json", config)
    if draw.random() < 0.5:
        named = {name: draw.choice(TEXTS) for name in draw.sample([*NAMES, "boi_token"], 3)}
        write(tmp_path, "special_tokens_map.json", named)
        write(tmp_path, "added_tokens.json", {text: size + n for n, text in enumerate(texts(3))})
    words = [*TEXTS, " ", "  ", "ab", "\n", "WORD"]
    check_equal(tmp_path, "".join(draw.choices(words, k=14)))


def test_a_map_of_a_token_needs_no_type_beside_its_content(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "</s>"}, "x_token": {}})
    with pytest.raises(ModelError, match=r"tokenizer_config.json: x_token is \{\}, and should be"):
        load_tokenizer(tmp_path)
    write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "</s>"}})
    assert load_tokenizer(tmp_path).encode("a</s>").ids[-1] == 256 == end_token_id(tmp_path)


def test_the_eos_token_of_a_tokenizer_ends_texts_if_the_model_has_its_id(tmp_path: Path) -> None:
    for number, (content, size) in enumerate([("</s>", 300), ("a", 300), ("</s>", 256), ("", 300)]):
        directory = tmp_path / str(number)
        write_tokenizer(directory, AddedToken("</s>", special=True))
        write(directory, "tokenizer_config.json", {"eos_token": content} if content else {})
        config = {"vocab_size": size, "eos_token_id": 3}
        files = ModelFiles("m", "m", config, {"eos_token_id": [4, 5]}, directory, None)
        end = {("</s>", 300): {256}, ("a", 300): {64}}.get((content, size), set())
        assert files.eos_token_ids == {3, 4, 5} | end


TEMPLATES = [("default", "d"), ("tool_use", "t")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("d", ("d", None)),
        (dict(TEMPLATES), ("d", "t")),
        ([{"name": name, "template": text} for name, text in TEMPLATES], ("d", "t")),
        ({"chat": "c"}, ("c", None)),
        ([{"name": "chat", "template": "c"}], ("c", None)),
        ({}, (None, None)),
        ([], (None, None)),
        (None, (None, None)),
    ],
)
def test_a_chat_template_may_be_a_text_a_map_or_a_list(
    tmp_path: Path, value: Any, expected: tuple[str | None, str | None]
) -> None:
    config = {"chat_template": value}
    assert template_source(tmp_path, config) == expected[0]
    assert tool_template_source(tmp_path, config) == expected[1]
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8-sig")
    assert template_source(tmp_path, config) == "file"
    assert tool_template_source(tmp_path, config) is None


@pytest.mark.parametrize("value", [3, True, ["x"], [{"name": "x"}], {"default": 3}, [[]]])
def test_a_chat_template_of_another_type_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config.json: chat_template is .*, and should"):
        template_source(tmp_path, {"chat_template": value})


def test_several_templates_need_a_default_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'a', 'b', and none is 'default'; choose a template with"):
        template_source(tmp_path, {"chat_template": {"a": "x", "b": "y"}})
