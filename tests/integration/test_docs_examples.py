"""The examples of the users' book do what the pages show, on one server of the built-in model.

Every fence of Python or of a shell in a page of the book runs, in the order of the page and in one
directory, as a program of its own. A fence of `text` right after one is what it prints, where `…`
stands for anything. A comment above a fence changes that:

    <!-- not run: REASON -->        the example needs what a test does not have
    <!-- needs: PACKAGE -->         it runs where the package is installed
    <!-- model: fill -->            it runs on a server of a tiny model that fills in the middle
    <!-- model: rank -->            it runs on a server of a tiny reranker
    <!-- exit code: N -->           it ends with this code instead of 0

Commands that start a server are not run: their flags are parsed and validated.
"""

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken

from bench.client.server import free_port
from quadriga.server.config import server_config as configuration
from quadriga.server.config.engine_args import BUILTIN_MODEL
from quadriga.server.models.formats.tokenizer import load_tokenizer
from tests.server import ROOT, running_server
from tests.tiny_encoders import CLASSIFIERS
from tests.tiny_models import VOCAB_SIZE, tiny_llama
from tests.users_book import BOOK, DOCS, Fence, fences

pytestmark = pytest.mark.timeout(300)

EXAMPLE_TIMEOUT_S = 90
HTTP_ADDRESS = "127.0.0.1:8000"
ZMQ_ADDRESS = "127.0.0.1:5555"
FILL_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
# A command of a shell that starts a server.
SERVE = re.compile(r"^(?:\w+=\S+ )*(?:\.venv/bin/)?quadriga serve ?(.*)$")
WRAPPER = """\
#!/bin/sh
command=$1
shift
case $command in
ask | chat | embed | top) exec {python} -m quadriga $command --endpoint tcp://{zmq} "$@" ;;
batch | trace) exec {python} -m quadriga $command --url http://{http} "$@" ;;
*) exec {python} -m quadriga $command "$@" ;;
esac
"""


@dataclass(frozen=True)
class Place:
    """A server, and a folder with a command `quadriga` that asks it by default."""

    http: str
    zmq: str
    bin: Path

    def localized(self, source: str) -> str:
        """Return an example with the addresses of this server in place of the default ones."""
        source = source.replace(HTTP_ADDRESS, self.http).replace(ZMQ_ADDRESS, self.zmq)
        return source.replace(".venv/bin/quadriga", "quadriga")


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[Place]:
    """Start a server with HTTP, and write its command."""
    port = free_port()
    flags = (*flags, "--port", str(port), "--max-total-tokens", "16384")
    with running_server(directory / "log", *flags) as server:
        place = Place(f"127.0.0.1:{port}", server.endpoint.removeprefix("tcp://"), directory)
        command = directory / "quadriga"
        command.write_text(WRAPPER.format(python=sys.executable, zmq=place.zmq, http=place.http))
        command.chmod(0o755)
        yield place


@pytest.fixture(scope="session")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Start the server that all pages share."""
    flags = ("--model", BUILTIN_MODEL, "--pooling", "mean")
    with serving(tmp_path_factory.mktemp("book"), *flags) as place:
        yield place


@pytest.fixture(scope="session")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Start a server of a model whose vocabulary has the marks for filling in the middle."""
    directory = tmp_path_factory.mktemp("book-fill")
    model = tiny_llama(directory / "model")
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in FILL_MARKS])
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    tokenizer.save(str(model / "tokenizer.json"))
    flags = ("--model", str(model), "--served-model-name", "qwen2.5-coder", "--dtype", "float32")
    with serving(directory, *flags) as place:
        yield place


@pytest.fixture(scope="session")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Start a server of a model that ranks texts."""
    directory = tmp_path_factory.mktemp("book-rank")
    model = CLASSIFIERS["bert"](directory / "model")
    with serving(directory, "--model", str(model), "--dtype", "float32") as place:
        yield place


@pytest.mark.parametrize("name", BOOK)
def test_the_examples_of_a_page_run(
    name: str, builtin: Place, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    blocks = fences(DOCS / name)
    num_run = 0
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language not in ("python", "bash") or block.comment("not run") is not None:
            continue
        package = block.comment("needs")
        if package and importlib.util.find_spec(package) is None:
            continue
        where = block.comment("model")
        place = request.getfixturevalue(where) if where else builtin
        shown = after.source if after is not None and after.language == "text" else None
        num_run += check(block, shown, place, tmp_path, f"docs/{name}:{block.line}")
    print(f"{num_run} examples of {name} ran")


def check(block: Fence, shown: str | None, place: Place, directory: Path, where: str) -> bool:
    """Run an example, and compare what it prints; return False where it only starts a server."""
    exit_code = int(block.comment("exit code") or 0)
    lines = joined_lines(block.source)
    if block.language == "bash" and SERVE.match(lines[0]) and exit_code == 0:
        for line in lines:
            check_server_flags(line, where)
        return False
    source = place.localized(block.source)
    program = (
        [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    )
    result = subprocess.run(
        [*program, source],
        cwd=directory,
        env={
            **os.environ,
            "PATH": f"{place.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=EXAMPLE_TIMEOUT_S,
        check=False,
    )
    report = f"{where} printed\n{result.stdout}\n{result.stderr}"
    assert result.returncode == exit_code, report
    if shown is not None:
        parts = [re.escape(part.strip()) for part in shown.strip().split("…")]
        assert re.fullmatch(r"\s*" + r".*?".join(parts) + r"\s*", result.stdout, re.S), report
    return True


def joined_lines(source: str) -> list[str]:
    """Return the commands of a shell's text, whose lines may go on after a backslash."""
    return source.replace("\\\n", " ").strip().splitlines()


def check_server_flags(line: str, where: str) -> None:
    """Fail unless a server would start with the flags of a command."""
    command = SERVE.match(line)
    assert command, f"{where}: a fence that starts a server has other commands: {line}"
    words = shlex.split(command[1], comments=True)
    model = ["--model", words.pop(0)] if words and not words[0].startswith("-") else []
    parser = argparse.ArgumentParser(exit_on_error=False)
    configuration.add_flags(parser)
    configuration.from_namespace(parser.parse_args([*model, *words])).validate()
