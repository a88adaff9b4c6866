"""The printed block and the JSON file."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.cli.options import parse
from bench.client.load_generator import RequestRecord
from bench.client.resources import (
    BENCH,
    DRAFTED_TOKENS,
    Reading,
    cost_between,
    cpu_seconds,
    is_local,
    pids_of,
    resident_bytes,
)
from bench.report import report
from bench.report.files import write_json
from bench.report.metrics import summarize
from bench.report.report import Progress, Result, block, classic_block, over_runs

KNOWN_LINES = [
    "=== streaming benchmark ===",
    "Model",
    "Device",
    "Pretok",
    "Tokenize workers",
    "Stream interval",
    "Paged attention",
    "CUDA Graph",
    "NVTX",
    "Requests",
    "Prompt tokens (total)",
    "Completion tokens (total)",
    "Submit wall",
    "Submit interval/schedule",
    "Submit lag",
    "add_request latency",
    "Tokenize",
    "Queue wait (post-tok)",
    "Prefill->first token",
    "TTFT",
    "TPOT",
    "ITL",
    "Latency",
    "Throughput (completion,total)",
]
INFO: dict[str, Any] = {
    "model": "gpt2",
    "device": "cpu",
    "dtype": "float32",
    "page_size": 16,
    "attention_backend": "torch",
    "step_gap_ms_p50": 0.25,
    "step_gap_ms_p99": 1.5,
}


def result(info: dict[str, Any] = INFO, error: str | None = None, flags: str = "",
           clients: int = 1) -> Result:  # fmt: skip
    record = RequestRecord(0, 100.0, 100.0005, received=100.01, tokenized=100.03, admitted=100.06,
                    first_token=100.1, finished=100.5, token_times=[100.1, 100.2],
                    arrivals=[100.15, 100.25], prompt_tokens=7, completion_tokens=2,
                    cached_tokens=4, error=error)  # fmt: skip
    counted = {"steps": 5, "busy_seconds": 1.0, DRAFTED_TOKENS: 7}
    before = Reading(100.0, counted, {"worker": 1.0, "detok": None})
    cpu, memory = {"worker": 2.0, "detok": 1.0}, {"worker": 90_000_000, "detok": None, BENCH: 5}
    counted = {"steps": 9, "busy_seconds": 2.5, DRAFTED_TOKENS: 8}
    after = Reading(102.0, info | counted, cpu, memory)
    records = [dataclasses.replace(record, client=client) for client in range(clients)]
    summary = summarize(records, 0.0015, parse(flags.split()).output.slo)
    return Result(summary, cost_between(before, after), records, info)


def lines_of(flags: str = "", **changes: Any) -> list[str]:
    return block(parse(flags.split()), result(flags=flags, **changes)).splitlines()


def test_the_known_lines_come_first_and_in_their_order() -> None:
    lines = block(parse([]), result()).splitlines()
    for line, name in zip(lines, KNOWN_LINES, strict=False):
        assert line.startswith(name), line


def test_the_classic_report_has_the_known_lines_and_no_others() -> None:
    lines = classic_block(parse(["--report", "classic"]), result()).splitlines()
    assert len(lines) == len(KNOWN_LINES)
    failed = classic_block(parse([]), result(error="QueueFull: no room")).splitlines()
    assert failed[len(KNOWN_LINES) :] == ["Failed requests: 1 (first error: QueueFull: no room)"]


def test_the_overview_is_a_table_and_a_verdict() -> None:
    lines = report.overview(
        parse(["--goodput", "ttft:200"]), result(flags="--goodput ttft:200")
    ).splitlines()
    assert lines[0] == "gpt2 on cpu (float32): 1 requests, 8 in flight"
    assert lines[1] == "prompts of 7 tokens, 57% of them cached; answers of 2 tokens; 0.5 s"
    assert lines[3].split() == ["ms", "mean", "p50", "p95", "p99"]
    assert "  tokenize              20.0      20.0      20.0      20.0" in lines
    assert lines[-1] == (
        "2.0 requests/s, 4 tokens/s; 50% of the tokens came from drafts; 100% within TTFT 200 ms;"
        " TTFT is spent 33 % in detokenization and delivery"
    )


def test_the_overview_names_failures_first() -> None:
    last = report.overview(parse([]), result(error="QueueFull: no room")).splitlines()[-1]
    assert last.startswith("1 of 1 requests failed (first error: QueueFull: no room)")


def test_progress_is_a_line_at_intervals_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(3, "run", line_interval_s=0.0) as progress:
        for _ in range(3):
            progress.update()
    assert capsys.readouterr().err.splitlines() == [
        "run: 1 of 3 requests after 0 s",
        "run: 2 of 3 requests after 0 s",
    ]


def test_the_figures_are_in_ms() -> None:
    lines = block(parse(["--submit-interval-ms", "20"]), result()).splitlines()
    expected = [
        "Model: gpt2",
        "Device: cpu (float32)",
        "Submit wall: 1.50 ms",
        "Submit interval/schedule: 20 ms / relative",
        "Submit lag p50/p95/p99: n/a (relative schedule)",
        "add_request latency p50/p95/p99: 0.500/0.500/0.500 ms",
        "TTFT p50/p95/p99: 150.00/150.00/150.00 ms",
        "TPOT p50/p95/p99: 100.00/100.00/100.00 ms",
        "Latency p50/p95/p99: 500.00/500.00/500.00 ms",
        "Throughput (completion,total): 4.00 tokens/s",
        "Detok + delivery p50/p95/p99: 50.00/50.00/50.00 ms",
        "Sum of the parts - TTFT: 0.000 ms at most, over all requests",
        "Prefix cache hits: 4 tokens (57.1% of the prompt tokens)",
        "Worker busy: 75.0% (4 steps)",
        "Step gap p50/p99: 0.250/1.500 ms",
        "CPU time per completion token: worker 500.000 ms, detok n/a",
        "Resident memory: 90 MB (worker 90)",
        "Failed requests: 0",
        "Request rate asked/achieved: 50 / 2.00 requests/s",
        "Input length mean (lowest to highest): 7.0 (7 to 7) tokens",
        "Output length mean (lowest to highest): 2.0 (2 to 2) tokens",
    ]
    for line in expected:
        assert line in lines


def test_figures_that_the_server_does_not_report_are_shown_as_n_a() -> None:
    options = parse(["--endpoint", "tcp://127.0.0.1:7777"])
    lines = block(options, result(info={})).splitlines()
    assert "Model: n/a" in lines
    assert "Stream interval: n/a" in lines
    foreign = block(parse(["--backend", "openai"]), result(info={})).splitlines()
    assert {"Paged attention: n/a", "CUDA Graph: n/a", "NVTX: n/a"} < set(foreign)
    assert "Step gap p50/p99: n/a/n/a ms" in lines


def test_a_server_of_its_own_has_the_settings_that_it_was_started_with() -> None:
    text = block(parse(["--stream-interval", "8", "--tokenize-workers", "3"]), result())
    assert "Stream interval: 8\n" in text
    assert "Tokenize workers: 3\n" in text


def test_switches_are_reported_as_they_are_in_force() -> None:
    assert "CUDA Graph: off\n" in block(parse([]), result())
    asked = block(parse(["--cuda-graph"]), result())
    assert "CUDA Graph: off (asked for, but the server does not have it)" in asked
    assert "CUDA Graph: on\n" in block(parse(["--cuda-graph"]), result({"cuda_graph": True}))
    assert "Pretok: on (random token ids)" in block(parse(["--random-input-len", "4"]), result())


@pytest.mark.parametrize(
    ("flags", "schedule", "rate"),
    [
        ("--report classic", "0 ms / relative", "inf"),
        ("", "0 ms after an end / closed loop of 8", "n/a"),
        ("--submit-interval-ms 20 --submit-schedule absolute", "20 ms / absolute", "50"),
        ("--submit-schedule absolute", "0 ms / absolute", "inf"),
        ("--request-rate 5", "200 ms on average / Poisson", "5"),
        (
            "--request-rate 5 --burstiness 0.5",
            "200 ms on average / gamma of burstiness 0.5",
            "5",
        ),
        ("--request-rate 5 --burstiness inf", "200 ms / absolute", "5"),
        ("--request-rate 5 --turns 2 --random-input-len 4", "200 ms on average / Poisson",
         "5 chats"),
        ("--max-concurrency 8", "0 ms after an end / closed loop of 8", "n/a"),
    ],
)  # fmt: skip
def test_the_schedule_is_said_as_it_was_asked_for(flags: str, schedule: str, rate: str) -> None:
    lines = lines_of(flags)
    assert f"Submit interval/schedule: {schedule}" in lines
    assert any(line.startswith(f"Request rate asked/achieved: {rate} /") for line in lines)


def test_goodput_is_there_with_limits_only() -> None:
    line = "Goodput (TTFT 200 ms, TPOT 50.5 ms): 0.0% of the requests, 0.00 requests/s"
    assert line in lines_of("--goodput ttft:200 tpot:50.5")
    line = "Goodput (TTFT 200 ms): 100.0% of the requests, 2.00 requests/s"
    assert line in lines_of("--goodput ttft:200")
    assert not any("Goodput" in line for line in lines_of())


def test_two_to_four_clients_are_shown_each() -> None:
    assert lines_of(clients=2)[-6:] == [
        f"Client {client} {line}"
        for client in range(2)
        for line in (
            "requests (failed): 1 (0)",
            "TTFT p50/p95/p99: 150.00/150.00/150.00 ms",
            "ITL p50/p95/p99: 100.00/100.00/100.00 ms",
        )
    ]
    for clients in (1, 5):
        assert not any(line.startswith("Client 0") for line in lines_of(clients=clients))


def test_the_prefix_cache_is_reported_as_the_server_has_it_or_was_started() -> None:
    assert "Prefix cache: off" in lines_of("--no-prefix-cache")
    assert "Prefix cache: on" in lines_of()
    assert "Prefix cache: off" in lines_of(info={"prefix_cache": False})
    assert "Prefix cache: n/a" in lines_of("--endpoint tcp://127.0.0.1:7777")


def test_a_failed_request_is_shown_with_its_error() -> None:
    text = block(parse([]), result(error="QueueFull: no room"))
    assert "Failed requests: 1 (first error: QueueFull: no room)" in text
    assert "TTFT p50/p95/p99: n/a" in text


def test_repeated_runs_give_a_median_and_a_range() -> None:
    text = over_runs([result(), result()])
    assert "TTFT p50: 150.00 (150.00 to 150.00) ms" in text


def test_the_json_file_has_every_figure_and_on_request_every_record(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = parse(["--json", str(path), "--details", "--page-size", "8"])
    write_json(
        options.output.json_path or path, options, INFO, [result(clients=5)], [result().summary]
    )
    document = json.loads(path.read_text())
    assert document["server_flags"]["worker"]["page_size"] == 8
    assert document["runs"][0]["summary"]["ttft"]["p50"] == pytest.approx(150.0)
    assert document["runs"][0]["records"][0]["prompt_tokens"] == 7
    assert document["runs"][0]["summary"]["clients"][4]["ttft"]["p50"] == pytest.approx(150.0)
    assert document["runs"][0]["summary"]["cache_hit_rate"] == pytest.approx(4 / 7)
    assert document["flags"]["request_rate"] == "inf"
    assert document["runs"][0]["cost"]["cpu"] == {"worker": 1.0, "detok": None}
    assert len(document["warmups"]) == 1
    assert document["date"].endswith("+00:00")


def test_cpu_time_of_this_process_is_known_and_of_a_dead_one_is_not() -> None:
    seconds = cpu_seconds({"self": os.getpid(), "dead": 2**22 + 1})
    assert seconds["self"] is not None and seconds["self"] > 0
    assert seconds["dead"] is None


def test_memory_of_this_process_is_known_and_of_a_dead_one_is_not() -> None:
    held = resident_bytes({"self": os.getpid(), "dead": 2**22 + 1})
    assert held["self"] is not None and held["self"] > 10_000_000
    assert held["dead"] is None


def test_pids_count_only_on_this_machine() -> None:
    assert is_local("tcp://127.0.0.1:1") and is_local("tcp://[::1]:1")
    assert not is_local("tcp://10.0.0.1:5555")
    assert pids_of({"pids": {"worker": 5}}, "tcp://10.0.0.1:1") == {BENCH: os.getpid()}
    assert pids_of({"pids": {"worker": 5}}, "tcp://127.0.0.1:1") == {
        "worker": 5,
        BENCH: os.getpid(),
    }
