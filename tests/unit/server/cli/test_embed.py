"""`quadriga embed` against a gateway before a ring that gives vectors."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from http_proc.core.gateway import Gateway
from quadriga.server.cli import embed as command
from quadriga.server.cli.main import EXIT_FAILED, EXIT_OK, main
from tests.unit.scripted_ring import run_at_gateway
from tests.unit.vector_ring import VectorRing

PORT = 26_000 + os.getpid() % 2000


def run(test: Any) -> VectorRing:
    scripted = VectorRing()

    async def with_gateway(gateway: Gateway) -> None:
        def quadriga(source: Path, output: Path, *flags: str) -> int:
            address = ("--endpoint", gateway.args.url)
            return main(["embed", str(source), "-o", str(output), *address, *flags])

        await asyncio.to_thread(test, quadriga)

    run_at_gateway(scripted, with_gateway, port=PORT)
    return scripted


def test_lines_become_a_file_that_numpy_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TEXTS_AT_ONCE", 3)
    texts = ["a", "bb", "\u00fc", "dddd", "eeeee"]
    source, output = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")

    def test(quadriga: Any) -> None:
        assert quadriga(source, output) == EXIT_OK
        vectors = np.load(output)
        assert vectors.dtype == np.float32
        assert vectors.shape == (5, 3)
        assert vectors[:, 0].tolist() == [float(len(text)) for text in texts]

    run(test)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "vectors.npy"]


def test_objects_become_lists(tmp_path: Path) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    source.write_text('{"body": "abc"}\n{"body": ""}\n')

    def test(quadriga: Any) -> None:
        flags = ("--field", "body", "--dimensions", "3", "--no-normalize", "--truncate")
        assert quadriga(source, output, *flags) == EXIT_OK
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert lines == [[3.0, -1.5, 0.25], [0.0, -1.5, 0.25]]

    (_, params, options), _ = run(test).submitted
    assert (params.pooling.normalize, params.pooling.dimensions) == (False, 3)
    assert options["truncate_prompt"]


@pytest.mark.parametrize(
    ("name", "text", "output", "words"),
    [
        ("texts.txt", "a", "vectors.csv", "must end with .npy or .jsonl"),
        ("texts.txt", "", "vectors.npy", "has no lines"),
        ("texts.jsonl", '{"text": "a"}\n{"other": "a"}', "vectors.npy", "line 2 is no object"),
    ],
)
def test_what_cannot_be_embedded_is_said(
    tmp_path: Path, name: str, text: str, output: str, words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / name).write_text(text)

    def test(quadriga: Any) -> None:
        assert quadriga(tmp_path / name, tmp_path / output) == EXIT_FAILED

    run(test)
    assert words in capsys.readouterr().err
    assert not (tmp_path / output).exists()
