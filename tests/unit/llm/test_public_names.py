"""`from quadriga import …`: what it loads, and what a type checker sees of it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import quadriga
from quadriga import errors

ROOT = Path(__file__).resolve().parents[3]

LOADED = "import sys; before = set(sys.modules); {}; print(*(set(sys.modules) - before))"


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a statement imports in a new interpreter."""
    code = LOADED.format(statement)
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60, stdout=subprocess.PIPE
    )
    return set(output.stdout.decode().split())


def test_importing_the_package_loads_nothing_of_it() -> None:
    assert {name for name in loaded_by("import quadriga") if name.startswith("quadriga.")} == set()


def test_importing_llm_loads_no_heavy_library() -> None:
    heavy = {"torch", "numpy", "transformers", "tokenizers", "aiohttp", "jinja2", "huggingface_hub"}
    assert not loaded_by("from quadriga import *") & heavy


def test_every_public_name_is_there_and_listed() -> None:
    for name in quadriga.__all__:
        assert getattr(quadriga, name) is not None
    assert set(quadriga.__all__) <= set(dir(quadriga))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'quadriga' has no attribute 'Cleint'"):
        _ = quadriga.Cleint


def test_a_type_checker_sees_the_names_that_the_table_has() -> None:
    tree = ast.parse(Path(quadriga.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.asname)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    table = {(module, name) for name, module in quadriga._MODULE_OF.items()}
    assert seen == table | {("quadriga", "errors")}


def test_every_error_is_public() -> None:
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names <= set(quadriga.__all__)


PROGRAM = """
from quadriga import LLM, Client, SamplingParams

params = SamplingParams(max_tokens=5, temperature=0.5)
with LLM("smollm2-135m", max_batch_size=8, dtype="float32") as llm:
    text: str = llm.generate("a", params).text
    texts: list[str] = [done.text for done in llm.generate(["a", "b"], [params, params])]
    answer: str = llm.chat([{"role": "user", "content": "a"}]).text
    ttft: float | None = llm.generate("a", timeout=5).timings.ttft
    for chunk in llm.stream("a", params):
        text += chunk.text
"""
MISTAKES = {
    "LLM(max_bach_size=8)": '"max_bach_size"',
    'LLM(dtype="float8")': '"dtype"',
    "SamplingParams(temprature=1)": '"temprature"',
    'SamplingParams(temperature="hot")': '"temperature"',
    'Client().generate("a", timeuot=5)': '"timeuot"',
    'Client().generate("a", temperature=0)': '"temperature"',
    'Client().generate("a", {"seed": 1})': "generate",
    'Client().generat("a")': '"generat"',
}


@pytest.mark.timeout(300)
def test_mypy_accepts_a_program_and_finds_its_mistakes(tmp_path: Path) -> None:
    """One run of mypy for the whole program, since it takes seconds."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(MISTAKES))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent",
         "--cache-dir", str(tmp_path / "cache"), str(program)],
        cwd=ROOT, timeout=290, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    found: dict[int, str] = {}
    for line in ran.stdout.splitlines():
        if line.startswith(str(program)) and ": error:" in line:
            _, number, text = line.split(":", 2)
            found.setdefault(int(number) - len(PROGRAM.splitlines()) - 1, text)
    for index, (statement, name) in enumerate(MISTAKES.items()):
        assert name in found.pop(index, ""), f"{statement}\n{ran.stdout}"
    assert not found, ran.stdout
