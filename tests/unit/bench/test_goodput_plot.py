"""The plot of several tables of bench.simulate --vary."""

import json
from pathlib import Path

import pytest

from bench.simulate.goodput_plot import main, read_column

GOODPUT = {"no target": 40.0, "mixed": 90.0, "4 apart": 80.5, "auto": 88.0}


def write_table(path: Path, replicas: int, goodput: dict[str, float]) -> str:
    """Write what `--vary` writes. Return LABEL=FILE, with the beginning of the name as label."""
    table = f"{replicas} replicas, 100 requests, ttft:1000"
    rows = [{"table": table, "": name, "goodput, %": share} for name, share in goodput.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{path.stem.rstrip('0123456789')}={path}"


def test_a_column_is_read_from_the_lines_of_a_table(tmp_path: Path) -> None:
    column = read_column(write_table(tmp_path / "code.json", 16, GOODPUT))
    assert column == ("code", 16, GOODPUT)


def test_each_label_has_a_panel_and_each_file_a_place(tmp_path: Path) -> None:
    places = ("code", 8), ("code", 16), ("chats", 8)
    columns = [write_table(tmp_path / f"{name}{num}.json", num, GOODPUT) for name, num in places]
    drawn = tmp_path / "plot.svg"
    assert main([*columns, "--output", str(drawn)]) == 0
    text = drawn.read_text()
    assert all(f">{label}<" in text for label in ("code", "chats", "16", "auto", "all mixed"))
    first = drawn.read_bytes()
    main([*columns, "--output", str(drawn)])
    assert drawn.read_bytes() == first, "the same figures have the same file"


def test_a_table_without_a_row_for_auto_is_refused(tmp_path: Path) -> None:
    column = write_table(tmp_path / "code.json", 8, {"mixed": 90.0, "4 apart": 80.0})
    with pytest.raises(SystemExit):
        main([column, "--output", str(tmp_path / "plot.svg")])
