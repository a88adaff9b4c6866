"""The table of products with the quantized types of a GGUF."""

import pytest

from bench.cli.command import EXIT_OK
from bench.roofline import formats
from quadriga.server.models.formats.quantization import BLOCK_SIZES


def test_every_type_has_a_row_with_times_and_floors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formats, "NUM_ROUNDS", 1)
    monkeypatch.setattr(formats, "READ_BYTES", 2**20)
    assert formats.main(["--inputs", "256", "--outputs", "32", "--threads", "1"]) == EXIT_OK
    printed = capsys.readouterr().out
    lines = [line.split("|")[1:-1] for line in printed.splitlines()[4:]]
    assert [line[0].strip() for line in lines] == list(BLOCK_SIZES)
    assert "| Q4_K | 4.50 |" in printed
    assert all(float(cell.split("(")[0]) > 0 for line in lines for cell in line[2:])
