"""Incremental decoding: the pieces joined are tokenizer.decode's text, for any ids."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from detok_proc.incremental import (
    REPLACEMENT,
    WINDOW_TOKENS,
    DecoderFactory,
    Vocabulary,
    WindowedDecoder,
    _byte_alphabet,
)
from quadriga.wire.to_detok import PROMPT_END_TOKENS
from tests import EVERYTHING

SPACE = "\u2581"
EXAMPLES = 100 if EVERYTHING else 40


def byte_level_tokenizer() -> Tokenizer:
    """Single bytes, a few longer tokens, and added tokens inside and outside the alphabet."""
    tokens = [*sorted(ByteLevel.alphabet()), "Ġa", "ĠĠ", "ðŁ", "ðŁİ", "ab"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken("<|end|>", special=True),
            AddedToken("Ġspecial", special=True),
            AddedToken("two words", special=False),
            AddedToken("日本", special=False),
            AddedToken("é", special=False),
        ]
    )
    return tokenizer


def sentencepiece_decoder(*last: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )


def sentencepiece_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """Llama 2's kind: a token for each byte, a mark for the space."""
    words = [SPACE, f"{SPACE}a", "b", f"{SPACE}{SPACE}", "é", "日", "\ufffd", "x\ufffd", " ", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def word_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    tokens = ["[UNK]", "[CLS]", "un", "##do", "##ne", ".", "don", "'", "t", "do</w>", "a</w>"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[UNK]", "[CLS]"])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
WINDOWED = {
    "llama 2": sentencepiece_tokenizer(sentencepiece_decoder(decoders.Strip(" ", 1, 0))),
    "no strip": sentencepiece_tokenizer(sentencepiece_decoder()),
    "two spaces stripped": sentencepiece_tokenizer(
        sentencepiece_decoder(decoders.Strip(" ", 2, 0))
    ),
    "strip of tokens": sentencepiece_tokenizer(
        decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)])
    ),
    "metaspace": sentencepiece_tokenizer(decoders.Metaspace()),
    "metaspace first": sentencepiece_tokenizer(decoders.Metaspace(prepend_scheme="first")),
    "metaspace never": sentencepiece_tokenizer(decoders.Metaspace(prepend_scheme="never")),
    "metaspace and bytes": sentencepiece_tokenizer(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ),
    "replace": sentencepiece_tokenizer(decoders.Replace(SPACE, " ")),
    "byte fallback": sentencepiece_tokenizer(decoders.ByteFallback()),
    "fuse": sentencepiece_tokenizer(decoders.Fuse()),
    "ctc": word_tokenizer(decoders.CTC("un", ".", cleanup=False)),
    "wordpiece": word_tokenizer(decoders.WordPiece()),
    "wordpiece without cleanup": word_tokenizer(decoders.WordPiece(cleanup=False)),
    "bpe suffix": word_tokenizer(decoders.BPEDecoder("</w>")),
    "byte level in a sequence": byte_level_tokenizer(),
    "none": word_tokenizer(None),
}
WINDOWED["byte level in a sequence"].decoder = decoders.Sequence(
    [decoders.ByteLevel(), decoders.Fuse()]
)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def pieces(
    tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: Sequence[int] = ()
) -> list[str]:
    decoder = DecoderFactory(tokenizer).make(skip, prompt[-PROMPT_END_TOKENS:])
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def ids_of(tokenizer: Tokenizer, max_size: int) -> st.SearchStrategy[list[int]]:
    """Draw also ids beyond the vocabulary, as a padded model can sample them."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 4), max_size=max_size)


def test_byte_level_decoders_are_recognized() -> None:
    assert not isinstance(DecoderFactory(BYTE_LEVEL).make(True), WindowedDecoder)
    for tokenizer in WINDOWED.values():
        assert isinstance(DecoderFactory(tokenizer).make(True), WindowedDecoder)


@settings(max_examples=5 * EXAMPLES, deadline=None)
@given(ids=ids_of(BYTE_LEVEL, 60), skip=st.booleans())
def test_byte_level_pieces_joined_are_the_whole_decoded(ids: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(BYTE_LEVEL, ids, skip)) == expected


@settings(max_examples=5 * EXAMPLES, deadline=None)
@given(st.lists(st.sampled_from([0x20, 0x41, 0x80, 0xBF, 0xC2, 0xC0, 0xE0, 0xA0, 0xED, 0x9F, 0xEF,
                                 0xF0, 0x90, 0x8F, 0xF4, 0xF5, 0xFF]), max_size=12))  # fmt: skip
@example([0xF0, 0x9F])
@example([0xED, 0xA0, 0x80])
@example([0xF4, 0x90, 0x80, 0x80])
def test_broken_utf8_is_replaced_as_the_tokenizer_does(values: list[int]) -> None:
    characters = {value: piece for piece, value in byte_characters().items()}
    ids = [id_of(BYTE_LEVEL, characters[value]) for value in values]
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


def byte_characters() -> dict[str, int]:
    return _byte_alphabet()


def test_the_byte_alphabet_is_the_tokenizers_own() -> None:
    assert set(byte_characters()) == set(ByteLevel.alphabet())
    assert sorted(byte_characters().values()) == list(range(256))


def test_no_piece_ends_within_a_character() -> None:
    ids = [id_of(BYTE_LEVEL, token) for token in ["ðŁ", "İ", "ī", "ab"]]
    assert pieces(BYTE_LEVEL, ids) == ["", "", "🎉", "ab", ""]


def test_half_a_character_at_the_end_is_flushed() -> None:
    ids = [id_of(BYTE_LEVEL, "ðŁ")]
    assert pieces(BYTE_LEVEL, ids) == ["", "\ufffd"]


@pytest.mark.parametrize("name", WINDOWED)
@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_windowed_pieces_joined_are_the_whole_decoded(
    name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = WINDOWED[name]
    ids = data.draw(ids_of(tokenizer, WINDOW_TOKENS - 1))
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, ids, skip)) == expected


@pytest.mark.parametrize("name", WINDOWED)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_an_answer_behind_a_prompt_is_the_text_of_both_less_the_prompts(
    name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = WINDOWED[name]
    prompt = data.draw(ids_of(tokenizer, 2 * PROMPT_END_TOKENS))
    ids = data.draw(ids_of(tokenizer, WINDOW_TOKENS - 1))
    vocabulary = Vocabulary(tokenizer)
    seen = [i for i in prompt if vocabulary.is_known(i) and not (skip and i < 3)]
    if seen and vocabulary.is_byte(seen[-1]):  # bytes go together, see below
        prompt.append(data.draw(st.integers(259, tokenizer.get_vocab_size() - 1)))
    begun = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assume(whole.startswith(begun))
    assume(name != "byte level in a sequence" or not begun.endswith(REPLACEMENT))
    assert "".join(pieces(tokenizer, ids, skip, prompt)) == whole[len(begun) :]


@pytest.mark.parametrize("name", ["llama 2", "no strip", "metaspace and bytes"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.text(max_size=40), st.data())
def test_a_prompt_that_ends_within_a_character_is_continued(
    name: str, text: str, data: st.DataObject
) -> None:
    tokenizer = WINDOWED[name]
    ids = [id_of(tokenizer, f"{SPACE}a")] + [
        id_of(tokenizer, f"<0x{byte:02X}>") for byte in text.encode()
    ]
    cut = data.draw(st.integers(1, len(ids)))
    # The prompt's text as far as it is whole characters.
    begun = "a" + bytes(text.encode()[: cut - 1]).decode(errors="ignore")
    assert begun + "".join(pieces(tokenizer, ids[cut:], True, ids[:cut])) == "a" + text


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(st.text(max_size=20), st.data())
def test_a_byte_level_prompt_that_ends_within_a_character_is_continued(
    text: str, data: st.DataObject
) -> None:
    characters = {value: piece for piece, value in byte_characters().items()}
    ids = [id_of(BYTE_LEVEL, characters[byte]) for byte in text.encode()]
    cut = data.draw(st.integers(0, len(ids)))
    begun = text.encode()[:cut].decode(errors="ignore")
    assert begun + "".join(pieces(BYTE_LEVEL, ids[cut:], True, ids[:cut])) == text


@pytest.mark.parametrize("name", ["llama 2", "metaspace and bytes"])
def test_bytes_at_a_prompts_end_that_stay_broken_are_not_in_the_answer(name: str) -> None:
    tokenizer = WINDOWED[name]
    prompt = [id_of(tokenizer, token) for token in (f"{SPACE}a", "<0xE6>", "<0x97>")]
    assert "".join(pieces(tokenizer, [id_of(tokenizer, "b")], True, prompt)) == "b"
    assert "".join(pieces(tokenizer, [], True, prompt)) == ""
    characters = {value: piece for piece, value in byte_characters().items()}
    begun = [id_of(BYTE_LEVEL, characters[byte]) for byte in (0x41, 0xE6, 0x97)]
    assert "".join(pieces(BYTE_LEVEL, [id_of(BYTE_LEVEL, "ab")], True, begun)) == "ab"
    assert "".join(pieces(BYTE_LEVEL, [], True, begun)) == ""


def test_the_first_space_is_kept_behind_a_prompt_and_stripped_without_one() -> None:
    tokenizer = WINDOWED["llama 2"]
    ids = [id_of(tokenizer, token) for token in (f"{SPACE}a", f"{SPACE}{SPACE}", "b")]
    start = id_of(tokenizer, "<s>")
    assert pieces(tokenizer, ids) == ["a", "  ", "b", ""]
    assert pieces(tokenizer, ids, True, [id_of(tokenizer, "b")]) == [" a", "  ", "b", ""]
    assert pieces(tokenizer, ids, True, [id_of(tokenizer, "b"), start]) == [" a", "  ", "b", ""]
    # A prompt without text is none, and with text that is far away it is one.
    assert pieces(tokenizer, ids, True, [start]) == ["a", "  ", "b", ""]
    far = [id_of(tokenizer, "b"), *[start] * PROMPT_END_TOKENS]
    assert pieces(tokenizer, ids, True, far) == [" a", "  ", "b", ""]


@pytest.mark.parametrize("name", ["llama 2", "no strip"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.text(max_size=150), st.integers(0, 3))
def test_windowed_text_of_any_length_comes_whole(name: str, text: str, words: int) -> None:
    tokenizer = WINDOWED[name]
    ids = [id_of(tokenizer, f"{SPACE}a")] * words + [
        id_of(tokenizer, f"<0x{byte:02X}>") for byte in text.encode("utf-8")
    ]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_long_run_of_bytes_is_not_held_back_for_ever() -> None:
    tokenizer = WINDOWED["llama 2"]
    ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in ("日" * 100).encode()]
    seen, lag = "", 0
    decoder = DecoderFactory(tokenizer).make(True)
    for count, token_id in enumerate(ids, 1):
        seen += decoder.push(token_id)
        assert "\ufffd" not in seen
        lag = max(lag, count - len(seen.encode()))
    assert lag <= WINDOW_TOKENS
    assert seen + decoder.flush() == "日" * 100


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, *WINDOWED.values()])
def test_special_tokens_and_unknown_ids_between_words_leave_no_trace(tokenizer: Tokenizer) -> None:
    ids = [4, 5, 1, tokenizer.get_vocab_size() + 100, 4, 1, 1, 5]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["llama 2", "byte level in a sequence"])
def test_broken_bytes_without_end_cost_the_same_for_each_token(name: str) -> None:
    tokenizer = WINDOWED[name]
    token = "<0xFF>" if name == "llama 2" else "ÿ"
    counted = Counting(tokenizer)
    decoder = DecoderFactory(cast(Tokenizer, counted)).make(True)
    for _ in range(5000):
        decoder.push(id_of(tokenizer, token))
    assert counted.decoded <= 5000 * (WINDOW_TOKENS + 8)


class Counting:
    """A tokenizer that counts the ids it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        text: str = self._tokenizer.decode(ids, **options)
        return text


def test_a_byte_level_token_is_never_decoded_again() -> None:
    counted = Counting(BYTE_LEVEL)
    decoder, before = DecoderFactory(cast(Tokenizer, counted)).make(True), counted.decoded
    for token in ["ðŁ", "Ġa", "ab", "ÿ"] * 500:
        decoder.push(id_of(BYTE_LEVEL, token))
    assert counted.decoded == before
