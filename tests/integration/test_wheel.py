"""The wheel: what it contains, and that it runs beside a user's files of the same names."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.client.server import free_port
from quadriga import __version__
from quadriga.client import Client, SamplingParams
from tests.server import ROOT, kill_tree, wait_until_ready
from worker_proc.cpu.levels import LEVELS

PROGRAMS = "quadriga/_programs/"
PAGE_SOURCE = ROOT / "http_proc" / "page" / "source"  # of which npm makes the bundle
PACKAGES = ("quadriga", "tokenizer_proc", "scheduler_proc", "worker_proc", "detok_proc",
            "http_proc", "cluster_proc", "simulator")  # fmt: skip
SOURCES = (*PACKAGES, "bench", "launcher.py", "pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
SHADOW = 'raise RuntimeError("the user\'s file was imported")\n'
USER_PROGRAM = """
from quadriga.client import Client, SamplingParams

with Client("tcp://127.0.0.1:5555") as client:
    print(client.generate("Hello", SamplingParams(max_new_tokenz=5)).text)
"""


class Installation(NamedTuple):
    """An environment with the wheel, and a directory whose files have the programs' names."""

    python: Path
    directory: Path

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", *arguments]

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*arguments),
            cwd=self.directory, env=environment(), capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip


def environment() -> dict[str, str]:
    """Return this process's variables without those that make the checkout importable."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that it keeps no files of a build."""
    return copy_checkout(tmp_path_factory)


def copy_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the checkout."""
    copy, built = copy_checkout(tmp_path_factory), tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(built)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return next(built.glob("*.whl"))


def test_a_wheel_of_a_machine_has_kernels_for_its_levels(tmp_path: Path, checkout: Path) -> None:
    """By a compiler that writes what it is asked for."""
    compiler, built = tmp_path / "compiler", tmp_path / "built"
    compiler.write_text(
        """#!/bin/sh
        flags=
        while [ "$1" != -o ]; do flags="$flags $1"; shift; done
        echo "$flags" > "$2"
        """
    )
    compiler.chmod(0o755)
    variables = {"CXX": str(compiler), "QUADRIGA_WHEEL_KERNELS": "aarch64"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(built)],
        cwd=checkout, env=os.environ | variables, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"quadriga-{__version__}-py3-none-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(wheel) as archive:
        kernels = {
            Path(name).stem: archive.read(name).decode().split()
            for name in archive.namelist()
            if Path(name).parent.name == "prebuilt"
        }
    levels = LEVELS["aarch64"]
    assert {name: flags[4] for name, flags in kernels.items()} == {
        level.name: level.flags[0] for level in levels
    }


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Unpack the wheel into an environment that also finds the packages of this one."""
    home, directory = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("project")
    venv.create(home, symlinks=True, with_pip=False)
    packages = next(home.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    for name in (*PACKAGES[1:], "bench"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text(SHADOW)
    (directory / "launcher.py").write_text(SHADOW)
    return Installation(home / "bin" / "python", directory)


def files_of(folder: str) -> list[Path]:
    """Return the files of a folder, at any depth, without what Python compiled."""
    return [path for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"]


def test_the_wheel_has_one_top_level_name_and_all_that_it_needs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        "quadriga",
        f"quadriga-{__version__}.dist-info",
    }
    needed = {str(path.relative_to(ROOT)) for path in files_of("quadriga")}
    programs = [ROOT / "launcher.py", *(path for name in PACKAGES[1:] for path in files_of(name))]
    installed = (path for path in programs if PAGE_SOURCE not in path.parents)
    needed |= {PROGRAMS + str(path.relative_to(ROOT)) for path in installed}
    assert {name for name in names if ".dist-info/" not in name} == needed


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("quadriga --version", f"quadriga {__version__}"),
        ("quadriga serve --version", f"quadriga {__version__}"),
        ("quadriga serve --help", "usage: quadriga serve [MODEL ...] [FLAGS]"),
    ],
)
def test_commands_run_beside_files_of_the_same_names(
    installation: Installation, command: str, shown: str
) -> None:
    done = installation.run(*command.split())
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_what_if_simulates_without_the_bench(installation: Installation) -> None:
    program = "from quadriga.programs import load_function as l; l('simulator.what_if', 'main')"
    done = subprocess.run(
        [installation.python, "-c", program],
        cwd=installation.directory, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("quadriga bench --help", "bench.serving"),
        ("quadriga.programs bench.compare --help", "bench.compare"),
    ],
)
def test_the_bench_says_where_it_is(installation: Installation, command: str, module: str) -> None:
    done = installation.run(*command.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{module} is not part of an installed wheel")
    assert done.stderr.count("\n") == 1
    assert "clone the repository" in done.stderr


def test_a_server_runs_beside_files_of_the_same_names(
    installation: Installation, llama_dir: Path, tmp_path: Path
) -> None:
    endpoint, log = f"tcp://127.0.0.1:{free_port()}", tmp_path / "log"
    flags = ["--model", str(llama_dir), "--endpoint", endpoint, "--worker-threads", "1"]
    flags += ["--max-total-tokens", "4096", "--port", str(free_port())]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*installation.command("quadriga", "serve"), *flags],
            cwd=installation.directory, env=environment(), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until_ready(server, log)
        with Client(endpoint) as client:
            grammar = SamplingParams(max_new_tokens=3, regex="[0-9]{3}")
            assert client.generate("Hello", grammar).text.isdigit()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0, log.read_text()
    finally:
        kill_tree(server)


def test_hints_name_the_package_and_not_the_checkout(installation: Installation) -> None:
    program = "import quadriga.programs as p; print(p.install_command('serve'), p.PROGRAMS_DIR)"
    done = subprocess.run(
        [installation.python, "-c", program],
        cwd=installation.directory, env=environment(), capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    command, directory = done.stdout.rsplit(maxsplit=1)
    assert command == "pip install 'quadriga[serve]'"
    assert directory.endswith("site-packages/quadriga/_programs")


def test_a_type_checker_finds_a_misspelt_keyword(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(USER_PROGRAM)
    flags = ["--strict", "--python-executable", str(installation.python), "--config-file="]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, "program.py"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert 'Unexpected keyword argument "max_new_tokenz" for "SamplingParams"' in done.stdout
    assert "Found 1 error" in done.stdout, done.stdout
