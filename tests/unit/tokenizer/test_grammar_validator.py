"""The check of grammars: requests that share one, requests that are refused, processes that die."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quadriga.errors import QueueFull, RequestFailed
from quadriga.sampling.params import Grammar
from quadriga.server.models.resolve import ModelFiles
from tokenizer_proc.intake.grammar_validator import MAX_ATTEMPTS, MAX_PENDING, GrammarValidator

MODEL = ModelFiles("m", "m", {"vocab_size": 8, "eos_token_id": 0}, {}, Path(), None)
# Dies at its first request, as often as its second argument says.
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


class SlowValidator(GrammarValidator):
    """Finishes its checks when `go` is set, and keeps the grammars that it was given."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.go = threading.Event()
        self.checked: list[Grammar] = []

    def _check_in_thread(self, grammar: Grammar) -> str:
        self.checked.append(grammar)
        assert self.go.wait(10)
        return f"form of {grammar.text}"


def check(validator: GrammarValidator, text: str, is_new: bool = True) -> "asyncio.Task[str]":
    return asyncio.create_task(validator.check(Grammar("regex", text), is_new))


async def test_requests_that_want_the_same_grammar_wait_together_however_many() -> None:
    validator = SlowValidator()
    checks = [check(validator, "a+") for _ in range(3 * MAX_PENDING)]
    await asyncio.sleep(0)
    assert validator.known_form(Grammar("regex", "a+")) is None
    validator.go.set()
    assert set(await asyncio.gather(*checks)) == {"form of a+"}
    assert len(validator.checked) == 1
    assert validator.known_form(Grammar("regex", "a+")) == "form of a+"


async def test_a_request_that_is_cancelled_leaves_the_check_to_others() -> None:
    validator = SlowValidator()
    checks = [check(validator, "a+") for _ in range(2)]
    await asyncio.sleep(0)
    checks[0].cancel()
    await asyncio.sleep(0)
    validator.go.set()
    assert await checks[1] == "form of a+"
    assert checks[0].cancelled()


@pytest.mark.parametrize("is_new", [True, False])
async def test_only_a_new_grammar_beyond_the_limit_of_pending_checks_is_refused(
    is_new: bool,
) -> None:
    validator = SlowValidator()
    checks = [check(validator, str(number)) for number in range(MAX_PENDING)]
    last = check(validator, "one more", is_new)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert last.done() == is_new
    validator.go.set()
    await asyncio.gather(*checks)
    if is_new:
        with pytest.raises(QueueFull, match=f"{MAX_PENDING} grammars wait"):
            await last
    else:
        assert await last == "form of one more"


@pytest.mark.parametrize("num_deaths", [1, MAX_ATTEMPTS])
async def test_a_check_whose_process_dies_is_tried_again(num_deaths: int, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.touch()
    validator = GrammarValidator(MODEL)
    validator._command = [sys.executable, "-c", CHECKER, str(deaths), str(num_deaths)]
    checks = [check(validator, "a+") for _ in range(2)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    if num_deaths < MAX_ATTEMPTS:
        assert results == ["the form"] * 2
    else:
        assert [type(result) for result in results] == [RequestFailed] * 2


def test_a_lenient_schema_that_takes_too_long_is_any_value_of_its_type(llama_dir: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tokenizer_proc.intake.grammar_sandbox",
        str(llama_dir),
        "512",
        "0",
    ]
    slow = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 999_983}}}
    lenient = {**slow, "x-guidance": {"lenient": True}}
    lines = "".join(f"{json.dumps(['json_schema', json.dumps(s)])}\n" for s in (slow, lenient))
    found = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
    refused, freed = (json.loads(line) for line in found.stdout.splitlines())
    assert refused[0] == "" and "simplify it" in refused[1]
    assert freed[1] == "" and "multipleOf" not in freed[0] and "object" in freed[0]


def test_a_checker_whose_frontend_has_died_ends_in_silence(llama_dir: Path) -> None:
    command = [sys.executable, "-m", "tokenizer_proc.intake.grammar_sandbox"]
    arguments = [str(llama_dir), "512", "0"]
    process = subprocess.Popen(
        command + arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.write(b'["regex", "a+"]\n')
    process.stdin.flush()
    assert process.wait(30) == 0
    assert process.stderr is not None and process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()
