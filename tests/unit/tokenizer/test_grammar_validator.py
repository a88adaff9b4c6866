"""Grammars before they are let in: who waits for the check, and who is refused."""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.errors import QueueFull, RequestFailed
from quadriga.model_files.resolve import ModelFiles
from quadriga.sampling.params import Grammar
from tokenizer_proc.grammars.validator import MAX_WAITING, TRIES, GrammarValidator

Answers = list[str]


MODEL = ModelFiles("m", "m", {"vocab_size": 8, "eos_token_id": 0}, {}, Path(), None)
CHECKER = """
import os, pathlib, sys
sys.stdin.readline()
deaths = pathlib.Path(sys.argv[1])
so_far = len(deaths.read_text())
if so_far < int(sys.argv[2]):
    deaths.write_text("x" * (so_far + 1))
    os._exit(1)
print('["the form", ""]', flush=True)
sys.stdin.read()
"""
"""Dies at its first request, so many times."""


class SlowDoor(GrammarValidator):
    """Answers when it is told to, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.go = threading.Event()
        self.checked: list[Grammar] = []

    def _ask(self, grammar: Grammar) -> str:
        self.checked.append(grammar)
        assert self.go.wait(10)
        return f"form of {grammar.text}"


def into(answers: Answers) -> Callable[["asyncio.Future[str]"], None]:
    def take(form: "asyncio.Future[str]") -> None:
        error = form.exception()
        answers.append(type(error).__name__ if error else form.result())

    return take


async def until(done: Callable[[], bool]) -> None:
    for _ in range(1000):
        if done():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing came")


def test_requests_that_want_the_same_grammar_wait_together_however_many() -> None:
    async def run() -> None:
        door, answers = SlowDoor(), Answers()
        count = 3 * MAX_WAITING
        for _ in range(count):
            door.check(Grammar("regex", "a+"), into(answers), is_new=True)
        assert answers == []
        door.go.set()
        await until(lambda: len(answers) == count)
        assert set(answers) == {"form of a+"}
        assert len(door.checked) == 1
        door.check(Grammar("regex", "a+"), into(answers), is_new=True)
        assert len(answers) == count + 1

    asyncio.run(run())


@pytest.mark.parametrize("is_new", [True, False])
def test_of_too_many_different_ones_the_last_is_refused_unless_it_was_let_in_before(
    is_new: bool,
) -> None:
    async def run() -> None:
        door, answers, last = SlowDoor(), Answers(), Answers()
        for number in range(MAX_WAITING):
            door.check(Grammar("regex", str(number)), into(answers), is_new=True)
        door.check(Grammar("regex", "one more"), into(last), is_new=is_new)
        assert last == ([QueueFull.__name__] if is_new else [])
        door.go.set()
        await until(lambda: len(answers) == MAX_WAITING and len(last) == 1)
        assert last == ([QueueFull.__name__] if is_new else ["form of one more"])

    asyncio.run(run())


@pytest.mark.parametrize(("deaths", "answer"), [(1, "the form"), (TRIES, RequestFailed.__name__)])
def test_a_check_whose_process_dies_is_tried_again(
    deaths: int, answer: str, tmp_path: Path
) -> None:
    counted = tmp_path / "deaths"
    counted.touch()

    async def run() -> None:
        door, answers = GrammarValidator(MODEL), Answers()
        door._command = [sys.executable, "-c", CHECKER, str(counted), str(deaths)]
        for _ in range(2):
            door.check(Grammar("regex", "a+"), into(answers), is_new=True)
        await until(lambda: len(answers) == 2)
        assert answers == [answer] * 2

    asyncio.run(run())
