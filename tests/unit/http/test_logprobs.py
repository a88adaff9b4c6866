"""Logprobs in the formats of OpenAI and vLLM."""

from http_proc.generation.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from quadriga.client.types import LikelyToken, TokenLogprob

WAVE = "👋".encode()


def token(number: int, data: bytes, logprob: float | None = -0.5) -> TokenLogprob:
    top = [] if logprob is None else [LikelyToken(9, -0.25, b"nine")]
    return TokenLogprob(number, logprob, data, top)


def test_tokens_within_a_character_have_its_offset_and_names_of_their_own() -> None:
    pieces = [token(1, b"a", None), token(2, WAVE[:2]), token(3, WAVE[2:]), token(4, b"b")]
    whole = CompletionLogprobs(10).render(pieces, "a👋b")
    assert whole["tokens"] == ["a", r"bytes:\xf0\x9f", r"bytes:\x91\x8b", "b"]
    assert whole["text_offset"] == [10, 11, 11, 12]
    assert whole["token_logprobs"][0] is whole["top_logprobs"][0] is None
    assert whole["top_logprobs"][1] == {r"bytes:\xf0\x9f": -0.5, "nine": -0.25}
    in_pieces = CompletionLogprobs(10)
    offsets = [in_pieces.render([piece], "")["text_offset"][0] for piece in pieces]
    assert offsets == whole["text_offset"], "a stream has the same offsets"


def test_special_tokens_that_the_text_lacks_add_no_characters() -> None:
    tokens = [token(1, b"<s>"), token(2, b"Hi"), token(3, b" <b>"), token(4, b"<|im_end|>")]
    assert CompletionLogprobs(0).render(tokens, "Hi <b>")["text_offset"] == [0, 0, 2, 6]
    kept = CompletionLogprobs(0).render(tokens, "<s>Hi <b><|im_end|>")["text_offset"]
    assert kept == [0, 3, 5, 9]
    stream = CompletionLogprobs(0)
    pieces = [("", tokens[0]), ("Hi", tokens[1]), (" <b>", tokens[2]), ("", tokens[3])]
    offsets = [stream.render([one], text)["text_offset"][0] for text, one in pieces]
    assert offsets == [0, 0, 2, 6]


def test_a_chat_has_the_bytes_of_each_token() -> None:
    (entry,) = chat_logprobs([token(2, WAVE[:2])])["content"]
    assert entry["bytes"] == list(WAVE[:2]) and entry["logprob"] == -0.5
    assert entry["top_logprobs"] == [{"token": "nine", "logprob": -0.25, "bytes": list(b"nine")}]


def test_a_prompts_tokens_are_ranked_by_id_where_they_are_among_the_likeliest() -> None:
    first, second = prompt_logprobs([token(1, b"a", None), token(2, b"b")])
    assert first is None
    assert second == {
        "2": {"logprob": -0.5, "rank": None, "decoded_token": "b"},
        "9": {"logprob": -0.25, "rank": 1, "decoded_token": "nine"},
    }
