"""Sockets that cannot be bound: what the error says."""

from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.wire.sockets import bind_public


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with pytest.raises(ConfigError, match=r"has at most \d+ characters; set TMPDIR to a shorter"):
        bind_public(f"ipc://{directory}/frontend")
