"""What a replay reads from a journal, what it sends, and where it finds a difference."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.sampling.params import Grammar
from quadriga.server.grammars.grammar import to_library_form
from quadriga.wire.grammar import GrammarForm, ThinkingForm
from scheduler_proc.journal import replay
from scheduler_proc.journal.replay import (
    EXIT_EQUAL,
    EXIT_FAILED,
    Difference,
    first_difference,
    grammar_fields,
    main,
    open_recorded,
    params_of,
    prompt_of,
)
from tests.unit.journal_runs import Run
from tests.unit.tiny_vocabulary import tiny_vocabulary


def test_a_choice_is_sent_again_with_its_own_seed_up_to_its_last_token(tmp_path: Path) -> None:
    run = Run(tmp_path)
    _, second = run.accept("a", n=2)
    run.generate(second, 5, 6, 7)
    run.journal.commit()
    recorded = open_recorded(tmp_path).find("a", 1)
    params = params_of(recorded)
    assert prompt_of(recorded) == [7, 8]
    assert (params.n, params.seed, params.max_new_tokens) == (1, 2, 3)
    assert params.logit_bias == {5: 1.0}


def test_what_computed_a_request_is_known_after_compactions_and_other_kernels(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.journal.set_kernels("first")
    (old,) = run.accept("old")
    run.generate(old, 5)
    run.journal.commit()
    run.journal.compact()
    run.journal.set_kernels("second")
    (new,) = run.accept("new")
    run.generate(new, 5)
    run.generate(old, 6, 7)
    run.journal.commit()
    assert [one.kernels for one in run.recovered()] == ["first; second", "second"]
    run.journal.keep(run.recovered()[0].message, [old], kernels="first")
    run.journal.compact()
    run.generate(new, 8)
    run.journal.commit()
    assert [one.kernels for one in run.recovered()] == ["first", "second"]


def test_what_cannot_be_replayed_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.accept("a")
    run.journal.commit()
    journal = ["--journal", str(tmp_path)]
    for arguments, complaint in (
        ([], "required: --journal"),
        (journal, "give the ID of a request, or --list"),
        (["a", "--list", *journal], "give the ID of a request, or --list"),
        (["b", *journal], "no request 'b', but 1 others: --list shows them"),
        (["a", *journal], "request a has no token yet"),
        (["a", "--choice", "1", *journal], "request a has no choice 1: it has 0"),
        (["a", "--journal", str(tmp_path / "none")], "none has no journal: give the directory"),
        (["a", *journal, "--endpoint", "tcp://a:1", "--dtype", "float32"], "--dtype is no flag of"),
    ):
        assert main(arguments) == EXIT_FAILED
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1
    (tmp_path / "journal").unlink()
    (tmp_path / "journal").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        open_recorded(tmp_path)


class StartingServer:
    """A client of a server whose worker is ready once it has answered a request."""

    def __init__(self) -> None:
        self._kernels: str | None = None

    def info(self) -> dict[str, Any]:
        return {"model": "tiny", "model_details": {"digest": "f1"}, "kernels": self._kernels}

    def generate(self, *_: Any) -> SimpleNamespace:
        self._kernels = "these"
        return SimpleNamespace(token_ids=[5], vector=None)


def test_kernels_of_a_server_that_was_still_starting_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.journal.set_kernels("others")
    (request,) = run.accept("a")
    run.generate(request, 5)
    run.journal.commit()

    @contextmanager
    def connected(*_: Any) -> Iterator[StartingServer]:
        yield StartingServer()

    monkeypatch.setattr(replay, "_connected", connected)
    assert main(["a", "--journal", str(tmp_path), "--endpoint", "tcp://a:1"]) == EXIT_EQUAL
    assert "other kernels: others in the journal, these now" in capsys.readouterr().out


@pytest.mark.parametrize("thinking", [None, ThinkingForm("</think>")])
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "[ab]/+c?"),
        Grammar("choice", '["yes", "no"]'),
        Grammar("ebnf", 'root ::= "a" | "b"'),
        Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    ],
)
def test_a_grammar_is_sent_again_as_the_same_grammar(
    llama_dir: Path, grammar: Grammar, thinking: ThinkingForm | None
) -> None:
    vocabulary = tiny_vocabulary(llama_dir, 512)
    text = to_library_form(grammar, vocabulary)
    ((kind, again),) = grammar_fields(GrammarForm.of(text, thinking)).items()
    assert to_library_form(Grammar(kind, again), vocabulary) == text


def test_a_reasoning_without_a_grammar_needs_none() -> None:
    assert grammar_fields(GrammarForm.of("", ThinkingForm("</think>", budget=3))) == {}
    with pytest.raises(InvalidRequest, match="cannot be sent again"):
        grammar_fields(GrammarForm.of('{"grammars": []}'))


def test_the_first_difference_is_found_also_at_an_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 5]) == Difference(1, 2, 4)
    assert first_difference([1, 2], [1]) == Difference(1, 2, None)
    assert first_difference([], [1]) == Difference(0, None, 1)
