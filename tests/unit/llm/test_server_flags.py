"""The server's flags as keywords of LLM."""

import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from quadriga.errors import ConfigError
from quadriga.llm.llm import ServerFlags, server_argv
from quadriga.server.config.flags import flag_fields
from quadriga.server.config.frontend_args import HttpArgs
from quadriga.server.config.server_config import ServerConfig

NOT_OFFERED = {
    "model", "served_model_name", "endpoint", "curve_dir", "insecure", "models", "models_dir",
    "model_memory", "model_turn", "sleep_idle_seconds",
}  # fmt: skip
"""The one model is an argument of its own, and the endpoint is private."""


def test_the_keywords_are_the_servers_flags_in_their_order_with_their_types() -> None:
    groups = [group for group in ServerConfig().groups() if not isinstance(group, HttpArgs)]
    fields = [field for field in flag_fields(*groups) if field.name not in NOT_OFFERED]
    hints = get_type_hints(ServerFlags)
    assert list(hints) == [field.name for field in fields]
    for field in fields:
        hint = hints[field.name]
        if get_origin(hint) is Literal:
            assert get_args(hint) == field.metadata["choices"]
        else:
            assert not field.metadata["choices"]
            assert hint == field.type or isinstance(hint, types.UnionType)


def test_keywords_become_flags() -> None:
    argv = server_argv(Path("/models/a"), {"max_batch_size": 8, "journal": Path("/j"), "tp": 1})
    assert argv == ["--model", "/models/a", "--endpoint", "ipc", "--max-batch-size", "8",
                    *argv[6:8], "--no-http", "--log-level", "warning"]  # fmt: skip
    assert argv[6:8] == ["--journal", "/j"]


def test_a_keyword_overrides_the_log_level() -> None:
    assert "debug" in server_argv("gpt2", {"log_level": "debug"})


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ({"max_bach_size": 8}, TypeError, "no keyword 'max_bach_size'; near it: max_batch_size"),
        ({"port": 8000}, TypeError, "no keyword 'port'"),
        ({"tensor_parallel_size": 2}, TypeError, "SGLang's --tensor-parallel-size is --tp here"),
        ({"plan_at_once": True}, TypeError, "--plan-at-once is no flag any more: each step is"),
        ({"max_batch_size": "8"}, ConfigError, "max_batch_size is '8': expected int, got str"),
        ({"dtype": "float8"}, ConfigError, "dtype is 'float8': it must be one of auto, float32"),
        ({"max_batch_size": 0}, ConfigError, "max_batch_size must be positive"),
    ],
)
def test_a_wrong_keyword_is_refused_before_anything_is_started(
    flags: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        server_argv("gpt2", flags)
