"""`quadriga embed texts.txt -o vectors.npy`: the vectors of the lines of a file."""

import argparse
import json
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from quadriga.client.sync_client import Client
from quadriga.errors import InvalidRequest
from quadriga.sampling.pooling import Pooling
from quadriga.server.cli import server_api, shared

TEXTS_AT_ONCE = 512
NPY_MAGIC = b"\x93NUMPY\x01\x00"
NPY_ALIGNMENT = 64  # of the data in a file


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "input", type=Path, metavar="texts",
        help="a text in each line; of a .jsonl, an object with the text in each line",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="vectors",
        help="a .npy of float32 [texts, dimensions], or a .jsonl with a list in each line",
    )  # fmt: skip
    parser.add_argument("--field", default="text", help="of a .jsonl (default: text)")
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep the first N numbers")
    parser.add_argument("--no-normalize", action="store_true", help="leave the vectors' lengths")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    shared.add_model(parser)
    shared.add_server(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the vectors of all lines of the input, in order."""
    source, output = arguments.input, arguments.output
    if output.suffix not in (".npy", ".jsonl"):
        raise InvalidRequest(f"output is {output}: its name must end with .npy or .jsonl", "output")
    count = sum(1 for _ in _texts(source, arguments.field))
    if not count:
        raise InvalidRequest(f"{source} has no lines", "input")
    partial = output.with_name(output.name + ".part")
    with partial.open("wb") as file, tqdm(total=count, unit="text", dynamic_ncols=True) as bar:
        for vectors in _vectors(arguments):
            if output.suffix == ".npy":
                if file.tell() == 0:
                    file.write(npy_header(count, len(vectors[0])))
                _write_floats(file, vectors)
            else:
                file.writelines(f"{json.dumps(list(each))}\n".encode() for each in vectors)
            bar.update(len(vectors))
    partial.replace(output)
    shared.note(f"{output} has {count} vectors")


def _texts(path: Path, field: str) -> Iterator[str]:
    """Yield the text of each line. Raise InvalidRequest for a line without one."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if path.suffix != ".jsonl":
                yield line.rstrip("\n")
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, LookupError, TypeError):
                text = None
            if not isinstance(text, str):
                raise InvalidRequest(
                    f"{path}: line {number} is no object with a text in {field!r}; name the field"
                    " with --field",
                    "input",
                )
            yield text


def _vectors(arguments: argparse.Namespace) -> Iterator[list["array[float]"]]:
    """Yield the vectors of the lines, some hundred at a time."""
    pooling = Pooling(normalize=not arguments.no_normalize, dimensions=arguments.dimensions)
    texts = _texts(arguments.input, arguments.field)
    if shared.is_web_address(arguments.endpoint):
        gateway = server_api.GatewayClient(
            arguments.endpoint, arguments.api_key, lambda _: None, arguments.model
        )
        while block := list(islice(texts, TEXTS_AT_ONCE)):
            yield gateway.embed(block, pooling, arguments.truncate)
        return
    with Client(arguments.endpoint, curve_dir=arguments.curve_dir, model=arguments.model) as client:
        while block := list(islice(texts, TEXTS_AT_ONCE)):
            embeddings = client.embed(block, pooling, truncate_prompt=arguments.truncate)
            yield [each.vector for each in embeddings]


def _write_floats(file: BinaryIO, vectors: list["array[float]"]) -> None:
    for vector in vectors:
        file.write(vector.tobytes())


def npy_header(rows: int, columns: int) -> bytes:
    """Return the head of a .npy file of little-endian float32 `[rows, columns]`.

    The format is https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.
    """
    fields = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    length = len(NPY_MAGIC) + 2 + len(fields) + 1
    padded = fields + " " * (-length % NPY_ALIGNMENT) + "\n"
    return NPY_MAGIC + len(padded).to_bytes(2, "little") + padded.encode("latin-1")
