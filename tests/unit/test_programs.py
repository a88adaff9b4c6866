"""Where the programs are, and how they start."""

import json
import os
import subprocess
import sys
from pathlib import Path

from quadriga import programs

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_has_its_programs_beside_the_package() -> None:
    assert programs.IS_CHECKOUT and programs.PROGRAMS_DIR == ROOT
    assert programs.install_command("serve") == "pip install -e '.[serve]'"


def test_a_program_runs_ahead_of_what_the_working_directory_has(tmp_path: Path) -> None:
    for name in ("bench", "tqdm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError")
    done = subprocess.run(
        [*programs.command_of("bench.compare"), "--help"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Compare server configurations" in done.stdout


def test_a_program_sees_its_own_arguments_and_search_path(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text("import json, sys; print(json.dumps([sys.argv, sys.path]))")
    done = subprocess.run(
        [*programs.command_of("probe"), "--flag"], env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    arguments, path = json.loads(done.stdout)
    assert arguments == [str(tmp_path / "probe.py"), "--flag"]
    assert path[:2] == [str(ROOT), str(tmp_path)] and str(ROOT / "quadriga") not in path


def test_no_module_of_the_package_has_the_name_of_one_of_pythons() -> None:
    """A child process starts with the package's directory on its search path."""
    names = {path.stem for path in (ROOT / "quadriga").iterdir()}
    assert not names & sys.stdlib_module_names
