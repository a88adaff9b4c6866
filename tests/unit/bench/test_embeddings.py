"""bench.embeddings: lengths of texts, and a library that is not there."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import embeddings
from quadriga.errors import ConfigError
from tests.tiny_encoders import tiny_bert


@pytest.mark.parametrize("length", [3, 16, 40])
def test_a_text_has_as_many_tokens_as_asked(length: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_bert(tmp_path) / "tokenizer.json"))
    texts = embeddings._texts(tokenizer, length, count=5, seed=1)
    assert len(set(texts)) == 5
    for text in texts:
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == length - 2


async def test_a_library_that_is_not_there_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    remedy = pytest.raises(ConfigError, match="--library-python")
    with embeddings._Library(str(python), tmp_path) as library, remedy:
        await library.embed(["one"])
