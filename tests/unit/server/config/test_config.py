"""The command line is made of the config's fields, and each value is checked at start."""

import argparse
import re
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.server.config import server_config as configuration
from quadriga.server.config.__main__ import markdown
from quadriga.server.config.engine_args import BUILTIN_MODEL, ModelArgs
from quadriga.server.config.flags import flag_fields, flag_name
from quadriga.server.config.server_config import ServerConfig


def parse(*argv: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    configuration.add_flags(parser)
    return configuration.from_namespace(parser.parse_args(argv))


def test_no_flags_give_the_defaults() -> None:
    assert parse() == ServerConfig()


def test_flags_reach_their_group_and_come_back_as_the_same_command_line() -> None:
    argv = ["--model", "gpt2", "--allow-auto-truncate", "--max-batch-size", "3",
            "--mem-fraction-static", "0.5", "--stream-interval", "8"]  # fmt: skip
    config = parse(*argv)
    assert config.model.model == "gpt2"
    assert config.frontend.allow_auto_truncate
    assert config.scheduler.max_batch_size == 3
    assert config.worker.mem_fraction_static == 0.5
    assert config.to_argv() == argv[:3] + argv[3:]
    assert parse(*config.to_argv()) == config


def test_a_model_on_disk_is_called_by_its_file_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    file = tmp_path / "models" / "tiny.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    names = {"models/tiny.gguf": "tiny.gguf", "./models/tiny/": "tiny", str(file): "tiny.gguf",
             "org/model": "org/model", "gpt2": "gpt2", "models": "models"}  # fmt: skip
    for model, name in names.items():
        assert ModelArgs(model).shown_name == name
    assert ModelArgs(str(file), "mine").shown_name == "mine"


def test_a_model_on_disk_is_known_by_its_path_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "tiny.gguf")
    of_child = ModelArgs(path, "tiny.gguf")
    for args in (ModelArgs("./tiny.gguf"), ModelArgs(path), of_child):
        assert args.source == path
        assert all(map(args.is_called, ("tiny.gguf", "./tiny.gguf", path)))
        assert not any(map(args.is_called, ("", "tiny", "other/tiny.gguf", str(tmp_path))))
    named = ModelArgs(path, "mine")
    assert named.source == "mine" and named.is_called("mine") and not named.is_called(path)
    assert ModelArgs().source == BUILTIN_MODEL


def test_every_flag_has_a_help_text() -> None:
    for field in flag_fields(*ServerConfig().groups()):
        assert field.metadata["help"], field.name


def test_a_field_that_is_no_flag_has_no_place_on_the_command_line() -> None:
    assert ServerConfig().replace(plan_at_once=True, max_open_batches=1).to_argv() == []


@pytest.mark.parametrize(
    "name",
    ["max-batch-size", "prefill-max-batch-size", "prefill-max-tokens", "max-running-requests",
     "max-queued-requests", "tokenize-workers", "stream-interval", "page-size",
     "max-total-tokens", "context-length", "worker-threads",
     "priority-preemption-threshold", "queue-timeout", "request-timeout"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_knob_that_is_not_positive_is_an_error_with_its_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"--{name}", value)
    assert f"{name.replace('-', '_')} must be positive" in str(caught.value)


@pytest.mark.parametrize("value", ["0", "1", "1.5", "-0.1"])
def test_a_memory_fraction_out_of_range_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        parse("--mem-fraction-static", value)


@pytest.mark.parametrize(
    "endpoint", ["localhost:5555", "inproc://socket", "", "tcp://127.0.0.1:99999"]
)
def test_an_endpoint_that_is_no_address_is_an_error_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:5555"):
        parse("--endpoint", endpoint)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--chunked-prefill-size 0", "must be positive, or -1"),
        ("--chunked-prefill-size -2", r"must be positive, or -1 for whole prompts \(it is -2\)"),
        ("--max-total-tokens 100 --page-size 16", "page_size 16 does not divide it; 96 would fit"),
        ("--batching static --batch-mode alternate", "contradicts --batch-mode alternate"),
        ("--batching static --decode-first", "contradicts --batch-mode decode-first"),
        ("--schedule-policy lpm --disable-radix-cache", "needs the prefix cache"),
        ("--schedule-policy dfs-weight --no-prefix-cache", "needs the prefix cache"),
        ("--dp 2 --disable-radix-cache", "add --load-balance-method least-loaded"),
        ("--dp 0", r"dp must be positive \(it is 0\)"),
        ("--max-replicas 2", "max_replicas works with --cluster ray only"),
        ("--tp 2 --nnodes 2", "nnodes works with --cluster ray only"),
        ("--cluster ray --nnodes 0", r"nnodes must be positive \(it is 0\)"),
        (
            "--cluster ray --tp 3 --nnodes 2",
            "tp is 3 and nnodes is 2: each machine has as many ranks as the others; start with"
            " --tp 4",
        ),
        ("--cluster ray --min-replicas 2", "min_replicas works with --max-replicas only"),
        ("--cluster ray --scale-down-after 1", "scale_down_after works with --max-replicas only"),
        (
            "--cluster ray --min-replicas 3 --max-replicas 2",
            "min_replicas is 3 and max_replicas is 2: the first must not be larger",
        ),
        ("--cluster ray --dp 3 --max-replicas 2", "dp is 3 and max_replicas is 2"),
        ("--cluster ray --max-replicas 0", r"max_replicas must be positive \(it is 0\)"),
        (
            "--cluster ray --max-replicas 2 --scale-down-after nan",
            r"scale_down_after must be 0 or more \(it is nan\)",
        ),
        ("--priority-preemption-threshold 3", "add --schedule-policy priority"),
        ("--tool-call-parser herms:exact", "tool_call_parser is 'herms'.*hermes"),
        ("--tool-call-parser :exact", "tool_call_parser is ':exact'"),
        ("--schedule-conservativeness 0", "above 0 and at most 10"),
        ("--schedule-conservativeness nan", "above 0 and at most 10"),
        (
            "--max-loras 8 --max-cpu-loras 4",
            r"--max-cpu-loras 4 is fewer than the 8 adapters of a step .*: set it to 8 or more",
        ),
        ("--max-cpu-loras 4", "fewer than the 16 adapters"),
        (
            '--max-loras 1 --lora-modules {"name":"a","path":"/a","pinned":true}',
            "1 pinned adapters, and --max-loras is 1, .* set it to 2 or more, or pin fewer",
        ),
    ],
)
def test_flags_that_cannot_work_or_contradict_each_other_are_an_error_at_start(
    flags: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(*flags.split())


@pytest.mark.parametrize("flag", ["--disable-radix-cache", "--no-prefix-cache"])
def test_the_prefix_cache_is_switched_off_by_either_name(flag: str) -> None:
    config = parse(flag)
    assert config.scheduler.disable_radix_cache
    assert config.to_argv() == ["--disable-radix-cache"]


def help_of(flag: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        parse(flag)
    return set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def test_help_shows_what_most_need_and_help_all_every_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = flag_fields(*ServerConfig().groups())
    flags = {flag_name(field.name) for field in fields}
    shown = help_of("--help", capsys) & flags
    assert 10 <= len(shown) <= 15 and {"--model", "--host", "--tp"} <= shown
    assert flags <= help_of("--help-all", capsys)


def test_the_help_shows_units_and_types_for_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help-all")
    text = capsys.readouterr().out
    for shown in (
        "--max-batch-size N", "--request-timeout SECONDS", "--context-length TOKENS",
        "--mem-fraction-static FRACTION", "--max-body-bytes BYTES", "--ssl-keyfile PATH",
        "--schedule-conservativeness FACTOR", "--served-model-name NAME", "--journal DIR",
    ):  # fmt: skip
        assert shown in text


def test_the_page_of_all_flags_is_current() -> None:
    page = Path(__file__).resolve().parents[4] / "docs" / "configuration.md"
    assert page.read_text() == markdown(), "python -m quadriga.server.config --markdown writes it"


def test_decode_first_and_static_batching_are_modes() -> None:
    assert parse().scheduler.mode == "mixed"
    assert parse("--decode-first").scheduler.mode == "decode-first"
    assert parse("--batching", "static").scheduler.mode == "prefill-first"


def test_the_step_budget_is_the_smaller_of_chunk_and_prefill_tokens() -> None:
    assert parse().scheduler.prefill_budget(128) == 128
    assert parse("--chunked-prefill-size", "64").scheduler.prefill_budget(128) == 64
    assert parse("--prefill-max-tokens", "100").scheduler.prefill_budget(128) == 100
    whole = parse("--chunked-prefill-size", "-1").scheduler
    assert whole.prefill_budget(128) == 16384 and whole.chunk_size(128) is None


def test_only_a_measured_step_may_be_half_again_as_large() -> None:
    assert parse().scheduler.prefill_slack(128) == 64
    assert parse("--prefill-max-tokens", "150").scheduler.prefill_slack(128) == 22
    assert parse("--chunked-prefill-size", "128").scheduler.prefill_slack(128) == 0
    assert parse("--chunked-prefill-size", "-1").scheduler.prefill_slack(128) == 0


def test_of_a_single_prompt_a_step_computes_256_tokens_where_they_are_measured() -> None:
    assert parse().scheduler.longest_chunk(128) == 256
    assert parse().scheduler.longest_chunk(512) == 512
    assert parse().scheduler.longest_chunk(8192) == 8192
    assert parse("--prefill-max-tokens", "150").scheduler.longest_chunk(128) == 150
    assert parse("--chunked-prefill-size", "128").scheduler.longest_chunk(64) == 128


def test_the_prefill_width_is_the_decode_width_where_unset() -> None:
    assert parse("--max-batch-size", "5").scheduler.prefill_width == 5
    config = parse("--max-batch-size", "5", "--prefill-max-batch-size", "7")
    assert config.scheduler.prefill_width == 7


def test_an_unknown_flag_in_replace_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no such flag: bogus"):
        ServerConfig().replace(bogus=1)
