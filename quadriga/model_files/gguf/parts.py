"""A GGUF that is split over files NAME-00001-of-00003.gguf, as llama.cpp's gguf-split writes them.

The first file has the metadata of the model; each has a part of the tensors.
"""

import re
from pathlib import Path

from quadriga.errors import ModelError
from quadriga.model_files.gguf.reader import GGUFHeader, TensorIndex, read_header

_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def gguf_files(path: Path) -> list[Path]:
    """Return all files of the GGUF that a file belongs to, the first one first; by their names."""
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) < 2:
        return [path]
    count = int(match["count"])
    return [
        path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]


def first_file(path: Path) -> Path:
    """Return the first file of the GGUF that `path` is a part of.

    Raises:
        ModelError: A part is missing.
    """
    files = gguf_files(path)
    missing = [file.name for file in files if not file.is_file()]
    if missing and path.is_file():
        raise ModelError(
            f"{path} is one of {len(files)} parts of a model, and {', '.join(missing)} is missing"
            " beside it; fetch all parts into one directory"
        )
    return files[0]


def read_whole_header(path: Path) -> GGUFHeader:
    """Return the metadata of the first file, and the tensors of all.

    Entries of tensors that are not in the first file have its index as "part".

    Raises:
        ModelError: A file cannot be read, or does not belong to the others.
    """
    header = read_header(path)
    files = gguf_files(path)
    count = header.metadata.get("split.count") or 1
    if count != len(files):
        raise ModelError(
            f"{path} is one of {count} parts of a model by its header, and of {len(files)} by its"
            f" name; name the parts NAME-00001-of-{count:05}.gguf and so on"
        )
    tensors: TensorIndex = dict(header.tensors)
    for part, file in enumerate(files[1:], 1):
        other = read_header(file)
        place = other.metadata.get("split.no"), other.metadata.get("split.count")
        if place != (part, count) or other.tensors.keys() & tensors.keys():
            raise ModelError(
                f"{file} is not part {part + 1} of {count} of the model of {path}; fetch it again"
            )
        tensors |= {name: {**entry, "part": part} for name, entry in other.tensors.items()}
    expected = header.metadata.get("split.tensors.count") or len(tensors)
    if expected != len(tensors):
        raise ModelError(
            f"the parts of {path} have {len(tensors)} tensors, its header names {expected}; fetch"
            " the files again"
        )
    return GGUFHeader(header.metadata, tensors)
