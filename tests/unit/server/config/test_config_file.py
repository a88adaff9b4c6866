"""--config: the flags of a server in a file."""

import argparse
import sys
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.server.config import server_config as config
from quadriga.server.config.server_config import ServerConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def read(file: Path, text: str, *flags: str) -> ServerConfig:
    file.write_text(text)
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return config.from_namespace(parser.parse_args(["--config", str(file), *flags]))


def test_keys_are_flags_without_their_dashes(file: Path) -> None:
    text = """
    model: gpt2
    max-batch-size: 8          # a comment
    max_running_requests: 9
    no-http: true
    fair-clients: false
    request-timeout: 30
    worker-threads:
    allowed-origins: [http://a.example, http://b.example]
    api-key: 12345
    """
    found = read(file, text)
    assert (found.model.model, found.frontend.request_timeout) == ("gpt2", 30.0)
    assert (found.scheduler.max_batch_size, found.scheduler.max_running_requests) == (8, 9)
    assert (found.http.no_http, found.scheduler.fair_clients) == (True, False)
    assert found.http.origins == ["http://a.example", "http://b.example"]
    assert found.http.api_keys == ["12345"]
    assert found.worker.worker_threads is None


def test_aliases_are_keys(file: Path) -> None:
    found = read(file, "decode-first: true\nno-prefix-cache: true")
    assert (found.scheduler.batch_mode, found.scheduler.disable_radix_cache) == (
        "decode-first",
        True,
    )
    assert read(file, "decode-first: false").scheduler.batch_mode == "mixed"


def test_the_command_line_wins(file: Path) -> None:
    found = read(file, "port: 9000\nmax-batch-size: 8", "--port", "9001")
    assert (found.http.port, found.scheduler.max_batch_size) == (9001, 8)


def test_an_empty_file_changes_no_default(file: Path) -> None:
    assert read(file, "") == ServerConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-batchsize: 3", "there is no flag 'max-batchsize'; near it: max-batch-size"),
        ("max-num-seqs: 3", "no flag 'max-num-seqs'; vLLM's --max-num-seqs is --max-running-req"),
        ("1: 3", "there is no flag 1$"),
        ("max-batch-size: many", "max-batch-size is 'many': expected int, got str"),
        ("max-batch-size: true", "max-batch-size is True: expected int, got bool"),
        ("max-batch-size: 0", "max_batch_size must be positive"),
        ("start-timeout: soon", "start-timeout is 'soon': expected float, got str"),
        ("no-http: 1", "no-http is 1: expected bool, got int"),
        ("model: {a: b}", "model is {'a': 'b'}: expected str, got object"),
        ("dtype: float8", "dtype is 'float8': it must be one of auto, float32"),
        ("- port", "must be a map of flags"),
        ("a: [", "server.yaml is no YAML: while parsing"),
    ],
)
def test_invalid_entries_are_reported_with_file_key_and_remedy(
    file: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(file, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    with pytest.raises(ConfigError, match=r"none.yaml cannot be read: No such file"):
        config.from_namespace(parser.parse_args(["--config", str(tmp_path / "none.yaml")]))


def test_without_the_library_it_says_what_to_install(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="PyYAML, which is not installed: pip install"):
        read(file, "port: 9000")
