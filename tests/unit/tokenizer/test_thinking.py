"""The end of a prompt says whether the answer is in the reasoning, may begin it, or is past it."""

from pathlib import Path

import pytest

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.validation import validate_params
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.models.resolve import ModelFiles
from quadriga.wire.client import ChatMessage, Generate
from quadriga.wire.grammar import ThinkingForm
from tests.unit.tokenizer.frontend_world import encoder
from tokenizer_proc.preparation.prepare import Prepared, Preparer, thinking_form

START, END = "<think>", "\n</think>\n\n"
MARKED = SamplingParams(thinking_start=START, thinking_end=END)
LIMITED = SamplingParams(thinking_start=START, thinking_end=END, thinking_token_budget=5)


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        ("assistant\n<think>\n", ThinkingForm(END, START, True, 5)),
        ("assistant\n<think>\nFirst, ", ThinkingForm(END, START, True, 5)),
        ("<think>a</think>b user: c assistant\n<think>", ThinkingForm(END, START, True, 5)),
        ("assistant\n", ThinkingForm(END, START, False, 5)),
        ("<think>a</think>b user: c assistant\n", ThinkingForm(END, START, False, 5)),
        ("", ThinkingForm(END, START, False, 5)),
        ("assistant\n<think>\n\n</think>\n\n", None),
    ],
)
def test_the_last_mark_in_the_prompt_counts(prompt_end: str, expected: ThinkingForm | None) -> None:
    assert thinking_form(LIMITED, prompt_end, has_grammar=False) == expected


def test_a_reasoning_that_nothing_begins_is_the_beginning_of_the_answer() -> None:
    params = SamplingParams(thinking_end=END)
    assert thinking_form(params, "a", True) == ThinkingForm(END, "", True, None)


def test_nothing_is_made_of_a_reasoning_on_which_nothing_depends() -> None:
    assert thinking_form(MARKED, "<think>", has_grammar=False) is None
    assert thinking_form(MARKED, "<think>", True) == ThinkingForm(END, START, True, None)
    assert thinking_form(SamplingParams(), "<think>", has_grammar=True) is None


def prepare(directory: Path, content: str | list[int], params: SamplingParams) -> Prepared:
    config = {"vocab_size": 4, "max_position_embeddings": 16}
    model = ModelFiles("m", "m", config, {}, directory, None)
    preparer = Preparer(FrontendArgs(), model, encoder(directory, None))
    if isinstance(content, str):
        chat: str | list[ChatMessage] = [ChatMessage("user", content)]
        return preparer.prepare(Generate(1, "r", chat, params, stream=False))
    ids = b"".join(token.to_bytes(4, "little") for token in content)
    return preparer.prepare(Generate(1, "r", "", params, False, prompt_token_ids=ids))


def test_a_request_goes_on_with_its_reasoning_in_place_of_the_parameters(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, "a", LIMITED)
    assert prepared.thinking == ThinkingForm(END, START, False, 5)
    params = prepared.request.params
    assert (params.thinking_token_budget, params.thinking_start, params.thinking_end) == (
        None, "", "",
    )  # fmt: skip
    marked = SamplingParams(thinking_start="b", thinking_end="a", thinking_token_budget=0)
    assert prepare(tmp_path, [2, 3], marked).thinking == ThinkingForm("a", "b", True, 0)
    assert prepare(tmp_path, [3, 2], marked).thinking is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(thinking_token_budget=3), "thinking_token_budget is 3: .*thinking_end"),
        (SamplingParams(logprob_token_ids=[1] * 129), "logprob_token_ids is 129 ids: at most 128"),
        (SamplingParams(logprob_token_ids=[10]), "logprob_token_ids holds 10"),
        (SamplingParams(thinking_start="<a>"), "thinking_start is '<a>': .*thinking_end"),
        (SamplingParams(thinking_end=" \n"), "more than whitespace"),
        (SamplingParams(thinking_end="x" * 65), "65 characters: at most 64"),
        (
            SamplingParams(thinking_end="x", thinking_token_budget=-1),
            "thinking_token_budget is -1: must be at least 0",
        ),
    ],
)
def test_a_reasoning_without_an_end_is_refused(params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        validate_params(params, vocab_size=10)
