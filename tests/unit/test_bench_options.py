"""Flags of the bench: what they mean, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.options import parse
from bench.server import free_port
from bench.serving import EXIT_NO_SERVER, EXIT_USAGE, main
from quadriga.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_server_flags_make_a_server_of_its_own() -> None:
    options = parse(["--model", "gpt2", "--max-batch-size", "8", "--stream-interval", "4"])
    assert options.server is not None
    assert options.server.scheduler.max_batch_size == 8
    assert options.server.detok.stream_interval == 4
    assert options.server.model.model == "gpt2"


def test_an_endpoint_means_the_running_server() -> None:
    options = parse(["--endpoint", "tcp://127.0.0.1:7777", "--model", "gpt2", "--paged-attn"])
    assert options.server is None
    assert options.endpoint == "tcp://127.0.0.1:7777"
    assert options.asked == ("paged_attn",)


def test_the_load_is_what_the_flags_say() -> None:
    flags = "--prompt Hi --prompt-repeats 3 --unique-prompts --num-requests 5 --max-new-tokens 9"
    pace = "--submit-interval-ms 20 --submit-schedule absolute --no-stop-on-eos --truncate"
    options = parse(f"{flags} {pace}".split())
    assert options.workload.text == "Hi Hi Hi"
    assert (options.workload.count, options.workload.unique) == (5, True)
    assert (options.schedule.interval, options.schedule.absolute) == (0.02, True)
    assert (options.params.max_new_tokens, options.params.ignore_eos) == (9, True)
    assert options.truncate is True
    assert parse([]).truncate is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-requests 0", "num_requests must be positive"),
        ("--max-new-tokens -1", "max_new_tokens must be positive"),
        ("--max-batch-size 0", "max_batch_size must be positive"),
        ("--prefill-max-batch-size 0", "prefill_max_batch_size must be positive"),
        ("--submit-interval-ms -1", "submit_interval_ms must be 0 or more"),
        ("--submit-interval-ms nan", "submit_interval_ms must be 0 or more"),
        ("--num-clients 0", "num_clients must be positive"),
        ("--seed -1", "seed must be from 0"),
        ("--random-input-len 4 --prompt x", "leave --prompt"),
        ("--details", "add --json FILE"),
        ("--json /no/such/place/x.json", "there is no directory"),
        ("--endpoint tcp://127.0.0.1:7777 --page-size 4", "--page-size would have no effect"),
        ("--endpoint nowhere", "must be tcp://"),
        ("--num-req 3", "unrecognized arguments"),
        ("--submit-schedule sometimes", "invalid choice"),
    ],
)
def test_bad_flags_get_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags.split())
    assert main(flags.split()) == EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_nobody_at_the_endpoint_is_one_line_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.serving.CONNECT_SECONDS", 0.1)
    assert main(["--endpoint", f"tcp://127.0.0.1:{free_port()}"]) == EXIT_NO_SERVER
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no answer from" in error


@pytest.mark.parametrize("command", [["-m", "bench.serving"], ["bench/serving.py"]])
def test_both_ways_to_start_it_work(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for flag in ("--pretok", "--prompt-repeats", "--cuda-graph", "--tokenize-workers"):
        assert flag in done.stdout


def test_the_bench_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'tokenizers', 'psutil'}"
    code = f"import sys, bench.serving; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
