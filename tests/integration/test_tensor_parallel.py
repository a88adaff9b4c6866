"""A worker of several processes: the tokens of one, and one rank's death is the worker's."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import ModelArgs, WorkerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from tests.integration.equality import NEW_TOKENS, generate
from tests.references import greedy_of
from tests.server import is_alive, running_server, wait_until
from tests.tiny_models import tiny_gemma2, tiny_gpt2, tiny_llama
from tests.unit.worker_driver import prompts_of
from worker_proc.startup.build import check_ranks

FLAGS = ["--device", "cpu", "--dtype", "float32", "--worker-threads", "1", "--page-size", "4"]

PROMPTS = prompts_of([1, 5, 30, 60])


def ranks_of(worker: int) -> list[int]:
    return [child.pid for child in psutil.Process(worker).children()]


def twelve_heads(directory: Path) -> Path:
    return tiny_gpt2(directory, n_head=12, n_embd=96)


def nine_heads(directory: Path) -> Path:
    return tiny_llama(
        directory,
        num_attention_heads=9,
        num_key_value_heads=3,
        hidden_size=144,
        intermediate_size=192,
        attention_bias=True,
    )


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("build", "num_ranks"), [(nine_heads, 3), (tiny_gemma2, 2)])
def test_ranks_give_the_tokens_of_one_process(
    build: Callable[[Path], Path], num_ranks: int, tmp_path: Path
) -> None:
    directory = build(tmp_path / "model")
    expected, log = greedy_of(directory, PROMPTS, NEW_TOKENS), tmp_path / "log"
    with running_server(log, "--model", str(directory), "--tp", str(num_ranks), *FLAGS) as server:
        ranks = ranks_of(server.pids["worker_proc"])
        assert len(ranks) == num_ranks - 1
        assert asyncio.run(generate(server.endpoint, PROMPTS)) == expected
    assert not [pid for pid in ranks if is_alive(pid)]


@pytest.mark.timeout(90)
def test_two_ranks_give_the_tokens_of_one_and_the_worker_restarts_after_a_rank_is_killed(
    tmp_path: Path,
) -> None:
    directory = twelve_heads(tmp_path / "model")
    expected, log = greedy_of(directory, PROMPTS, NEW_TOKENS), tmp_path / "log"
    with running_server(log, "--model", str(directory), "--tp", "2", *FLAGS) as server:
        assert asyncio.run(generate(server.endpoint, PROMPTS)) == expected
        worker = server.pids["worker_proc"]
        (rank,) = ranks_of(worker)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not is_alive(worker), 10)
        assert asyncio.run(generate(server.endpoint, PROMPTS)) == expected
    assert "rank 1 of the worker died (killed by SIGKILL)" in log.read_text()


def test_ranks_must_divide_the_heads(tmp_path: Path) -> None:
    files = resolve_model(ModelArgs(model=str(nine_heads(tmp_path))))
    with pytest.raises(ConfigError, match=r"tp is 2: .* 9 heads, 3 key and .*; possible: 1, 3"):
        check_ranks(WorkerArgs(tp=2, device="cpu"), files)


@pytest.mark.parametrize(
    "flags", [{"quantization": "int8"}, {"attention_backend": "native"}, {"kv_cache_dtype": "int8"}]
)
def test_features_of_a_single_process_are_refused_with_tensor_parallelism(
    flags: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match=r"tp is 2: .* works with one process only"):
        ServerConfig().replace(tp=2, **flags).validate()
