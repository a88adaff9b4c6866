"""The table of tests.house, on a small tree of files."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house import ROWS, House, pairs_text, table, tree_of

LAUNCHER = """
import argparse

parser = argparse.ArgumentParser("launcher.py", epilog="ports:  --none")
parser.add_argument("--help-all", action="help")
parser.add_argument("--config")
model = parser.add_argument_group("Model")
model.add_argument("--model", help="a long text that goes over several lines of the help, " * 3)
scheduling = parser.add_argument_group("Scheduling (scheduler_proc)")
scheduling.add_argument("--dp", "--data-parallel-size", type=int)
scheduling.add_argument("--resume", action="store_true")
parser.parse_args()
"""


def write(root: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(root)


def names(modules: Iterable[tuple[object, object]]) -> set[tuple[str, str]]:
    return {(module.name, importer.name) for module, importer in modules}  # type: ignore[attr-defined]


def test_modules_folders_and_lines_are_those_of_the_product(tmp_path: Path) -> None:
    house = write(
        tmp_path,
        {
            "quadriga/__init__.py": '"""Text."""\n',
            "quadriga/errors.py": "import os\nfrom sys import (\n    argv,\n    path,\n)\n",
            "scheduler_proc/__main__.py": "from scheduler_proc.loop.main import run\n\nrun()\n",
            "scheduler_proc/loop/main.py": "def run():\n    import zmq\n",
            "worker_proc/kernels/vector.h": "import of C++\n",
            "examples/chat.py": "import quadriga\n",
            "launcher.py": "import sys\n",
        },
    )
    assert house.num_modules() == 2
    assert house.num_folders() == 3
    assert house.num_lines() == 7
    assert house.num_package_lines() == 4
    assert house.num_imports() == 3


def test_a_module_has_one_importer_in_its_folder(tmp_path: Path) -> None:
    house = write(
        tmp_path,
        {
            "http_proc/answer/parser.py": "from http_proc.answer import tools\n",
            "http_proc/answer/tools.py": "from http_proc.answer.text import a, b\n",
            # Two importers.
            "http_proc/answer/text.py": "def f():\n    from http_proc.values import text\n",
            "http_proc/main.py": "import http_proc.answer.text\n",
            # One importer, of another folder.
            "http_proc/values/text.py": "",
            # One importer, for type checking.
            "http_proc/values/kinds.py": "",
            "http_proc/values/parts.py": "if TYPE_CHECKING:\n    from .kinds import Kind\n",
            # Tests and the launcher are no importers.
            "launcher.py": "import http_proc.answer.tools\n",
            "tests/test_tools.py": "import http_proc.answer.tools\n",
        },
    )
    assert names(house.modules_of_one_importer()) == {
        ("http_proc.answer.tools", "http_proc.answer.parser"),
        ("http_proc.values.kinds", "http_proc.values.parts"),
    }


def test_a_name_that_a_package_passes_on_is_imported_from_its_module(tmp_path: Path) -> None:
    files = {
        "quadriga/__init__.py": "from quadriga.wire import Submit as Message\n",
        "quadriga/wire/__init__.py": "from .submit import Submit\nVERSION = 1\n",
        "quadriga/wire/submit.py": "",
        "quadriga/wire/frames.py": "from quadriga import Message\n",
        "quadriga/client/ring.py": "from quadriga.wire import VERSION\n",
    }
    house = write(tmp_path, files)
    assert names(house.modules_of_one_importer()) == {
        ("quadriga.wire.submit", "quadriga.wire.frames")
    }
    assert house.pairs() == []
    house = write(tmp_path, {"quadriga/client/ring.py": "from quadriga.wire import Submit\n"})
    assert names(house.modules_of_one_importer()) == set()


def test_what_a_package_itself_needs_is_an_import(tmp_path: Path) -> None:
    files = {
        "bench/cli/__init__.py": "from bench.load import plan\n",
        "bench/load/plan.py": "from bench.cli import options\n",
        "bench/cli/options.py": "",
    }
    assert not write(tmp_path, files).pairs()
    house = write(
        tmp_path, {"bench/cli/__init__.py": "from bench.load import plan\nplan.check()\n"}
    )
    assert [pair.folders for pair in house.pairs()] == [("bench.cli", "bench.load")]


def test_folders_that_import_each_other_are_shown_with_a_line_of_each(tmp_path: Path) -> None:
    house = write(
        tmp_path,
        {
            "worker_proc/cpu/engine.py": "import os\nfrom worker_proc.gpu.pages import Pages\n",
            "worker_proc/gpu/pages.py": "",
            "worker_proc/gpu/engine.py": "def f():\n    import worker_proc.cpu.engine\n",
            # One way only.
            "worker_proc/models/llama.py": "from worker_proc.cpu import engine\n",
            # A folder and one in it.
            "worker_proc/main.py": "from worker_proc.models.llama import Llama\n",
            "worker_proc/models/gpt2.py": "from worker_proc import threads\n",
            "worker_proc/threads.py": "",
        },
    )
    assert pairs_text(house) == (
        "worker_proc <-> worker_proc.models\n"
        "    worker_proc/main.py:1 worker_proc.models.llama\n"
        "    worker_proc/models/gpt2.py:1 worker_proc.threads\n"
        "worker_proc.cpu <-> worker_proc.gpu\n"
        "    worker_proc/cpu/engine.py:2 worker_proc.gpu.pages\n"
        "    worker_proc/gpu/engine.py:2 worker_proc.cpu.engine"
    )
    assert house.num_pairs_side_by_side() == 1
    assert house.num_nested_pairs() == 1


def test_flags_are_those_of_the_groups_of_the_help(tmp_path: Path) -> None:
    assert write(tmp_path, {"launcher.py": LAUNCHER}).num_flags() == 3


def test_what_tests_take_from_each_other_and_from_inside(tmp_path: Path) -> None:
    house = write(
        tmp_path,
        {
            "tests/unit/test_a.py": "import tests.server\nfrom tests.unit import test_b\n",
            "tests/unit/test_b.py": "from tests.unit.test_a import (\n    a,\n    b,\n)\n",
            "tests/unit/frames.py": "from tests.unit.test_a import a\nsocket._closed\n",
            "tests/unit/test_private.py": (
                "class Link:\n"
                "    def __init__(self):\n"
                "        self._own = client._socket\n"
                "        self._socket_of()\n"
                "    def _socket_of(self):\n"
                "        return link._own, link._socket_of, link.__dict__, point._replace(x=1)\n"
                "assert client.link._clock\n"
            ),
        },
    )
    assert [str(example) for example in house.imports_between_tests()] == [
        "tests/unit/frames.py:1 tests.unit.test_a",
        "tests/unit/test_a.py:2 tests.unit.test_b",
        "tests/unit/test_b.py:1 tests.unit.test_a",
    ]
    assert {str(use) for use in house.private_uses()} == {
        "tests/unit/test_private.py:3 client._socket",
        "tests/unit/test_private.py:7 client.link._clock",
    }
    assert house.num_test_modules() == 3
    assert house.num_test_lines() == 15


def test_tests_and_fixtures_that_start_a_server_count_once(tmp_path: Path) -> None:
    twice = "    with running_server(1) as one, running_server(2) as other:\n        pass\n"
    house = write(
        tmp_path,
        {
            "tests/conftest.py": f"def server():\n{twice}",
            "tests/faults/test_deaths.py": f"def test_a():\n{twice}def test_b(server):\n    pass\n",
            "tests/faults/storm.py": f"def run():\n{twice}",
        },
    )
    assert house.num_server_starts() == 2


@pytest.mark.parametrize("is_markdown", [False, True])
def test_the_table_has_a_change_where_there_are_two_numbers(is_markdown: bool) -> None:
    header = ["", "before", "after", "change"]
    text = table(header, [("lines", [96037, 85000]), ("flags", [9, 9])], is_markdown=is_markdown)
    if is_markdown:
        assert text == (
            "|  | before | after | change |\n| --- | ---: | ---: | ---: |\n"
            "| lines | 96,037 | 85,000 | -11,037 |\n| flags | 9 | 9 | +0 |"
        )
    else:
        assert text == (
            "       before   after   change\n"
            "lines  96,037  85,000  -11,037\n"
            "flags       9       9       +0"
        )


def test_a_commit_is_counted_beside_the_files_that_came_after_it(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.com"]
    write(tmp_path, {"bench/a.py": "", "launcher.py": LAUNCHER})
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "One module"]):
        subprocess.run([*git, *command], check=True)
    now = write(tmp_path, {"bench/b.py": ""})
    with tree_of("HEAD", tmp_path) as folder:
        before = House(folder)
        assert {label: count(before) for label, count in ROWS.items()}["product modules"] == 1
    assert now.num_modules() == 2
