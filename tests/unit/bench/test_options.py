"""Flags of the bench: their meaning, and the combinations that are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli.command import EXIT_NO_SERVER, EXIT_USAGE
from bench.cli.options import parse
from bench.client.server import free_port
from bench.load.synthetic import Lengths, TraceSpec, generate
from bench.load.workload import Workload
from bench.serving import main
from quadriga.errors import ConfigError
from simulator.latency import Slo
from simulator.trace import TraceRequest, write_trace

ROOT = Path(__file__).resolve().parents[3]


def test_server_flags_make_a_server_of_its_own() -> None:
    options = parse(["--model", "gpt2", "--max-batch-size", "8", "--stream-interval", "4"])
    assert options.target.config is not None
    assert options.target.config.scheduler.max_batch_size == 8
    assert options.target.config.detok.stream_interval == 4
    assert options.target.config.model.model == "gpt2"


def test_an_endpoint_means_the_running_server() -> None:
    options = parse(["--endpoint", "tcp://127.0.0.1:7777", "--model", "gpt2", "--paged-attn"])
    assert options.target.config is None
    assert options.target.endpoint == "tcp://127.0.0.1:7777"
    assert options.requested == ("paged_attn",)


def test_keys_are_for_the_running_server_or_for_its_own() -> None:
    remote = ["--endpoint", "tcp://10.0.0.1:7777"]
    assert parse([*remote, "--curve-dir", "ann"]).target.curve_dir == "ann"
    assert parse(remote).target.curve_dir == ""
    own = parse(["--curve-dir", "keys"])
    assert own.target.config is not None
    assert own.target.curve_dir == own.target.config.frontend.curve_dir == "keys"


def test_the_load_is_what_the_flags_say() -> None:
    flags = "--prompt Hi --prompt-repeats 3 --unique-prompts --num-requests 5 --max-new-tokens 9"
    pace = "--submit-interval-ms 20 --submit-schedule absolute --no-stop-on-eos --truncate"
    options = parse(f"{flags} {pace}".split())
    assert options.load.workload.text == "Hi Hi Hi"
    requests = options.load.workload.requests
    assert (len(requests), options.load.workload.unique) == (5, True)
    assert options.load.send.gap_s is None
    assert [request.at for request in requests] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08])
    assert [request.max_new_tokens for request in requests] == [9] * 5
    assert options.load.send.params.ignore_eos is True
    assert options.load.send.truncate is True
    assert parse([]).load.send.truncate is None


def test_an_interval_is_relative_unless_asked_otherwise() -> None:
    assert parse(["--report", "classic"]).load.send.gap_s == 0.0
    assert parse(["--submit-interval-ms", "20"]).load.send.gap_s == 0.02
    for flags in ("--request-rate 5", "--max-concurrency 2", "--submit-schedule absolute"):
        assert parse(flags.split()).load.send.gap_s is None


def test_flags_of_the_classic_bench_imply_its_report_and_load() -> None:
    for flags in (
        "--no-stop-on-eos",
        "--prompt Hi",
        "--prefill-max-batch-size 8",
        "--report classic",
    ):
        options = parse(flags.split())
        assert options.output.report == "classic"
        assert isinstance(options.load.workload.text, str)
        assert options.load.send.gap_s == 0.0
    assert parse(["--no-stop-on-eos", "--request-rate", "5"]).output.report == "table"
    assert parse(["--prompt", "Hi", "--report", "table"]).output.report == "table"


def test_the_default_load_has_different_prompts_in_a_closed_loop() -> None:
    options = parse(["--num-requests", "20"])
    texts = options.load.workload.text
    assert options.output.report == "table"
    assert texts is not None and not isinstance(texts, str)
    assert len(set(texts)) == 20
    assert options.load.spec is not None and options.load.spec.max_concurrency == 8
    paced = parse(["--request-rate", "5"]).load
    assert paced.spec is not None and paced.spec.max_concurrency is None
    assert not isinstance(paced.workload.text, str)
    assert parse(["--random-input-len", "4"]).load.send.gap_s == 0.0


def test_traffic_is_generated_as_the_flags_say() -> None:
    lengths = "--random-input-len 16:256 --max-new-tokens lognormal:20:0.5:4:64"
    sharing = "--prefix-groups 3 --prefix-len 32 --prefix-order grouped --turns 2 --think-time 1.5"
    pace = "--request-rate 5 --burstiness 0.5 --num-clients 2 --num-requests 8 --seed 3"
    options = parse(f"{lengths} {sharing} {pace}".split())
    assert options.load.spec == TraceSpec(
        num_requests=8,
        output_len=Lengths(4, 64, 20.0, 0.5),
        input_len=Lengths(16, 256),
        request_rate=5.0,
        burstiness=0.5,
        prefix_groups=3,
        prefix_len=32,
        shuffle_groups=False,
        turns=2,
        think_time=1.5,
        num_clients=2,
        seed=3,
    )
    assert options.load.workload.requests == list(generate(options.load.spec))
    assert options.load.workload.text is None
    assert parse(["--max-concurrency", "4"]).load.workload.requests[4].follows == 0


def test_a_text_can_have_a_pace_and_lengths_too() -> None:
    flags = "--prompt Hi --request-rate 5 --max-new-tokens 1:9 --num-requests 50"
    options = parse(flags.split())
    assert options.load.workload.text == "Hi"
    assert len({request.max_new_tokens for request in options.load.workload.requests}) == 9


def test_a_trace_is_read_and_says_all_but_the_sampling(tmp_path: Path) -> None:
    trace = [TraceRequest(0.5, ((1, 4),), 2, client=3), TraceRequest(0.0, (), 2, follows=0)]
    write_trace(tmp_path / "t", trace)
    options = parse(f"--trace {tmp_path / 't'} --seed 4 --no-stop-on-eos".split())
    assert options.load.workload == Workload(trace, text=None, seed=4)
    assert (options.load.spec, options.load.send.gap_s) == (None, None)
    assert options.load.send.params.ignore_eos is True
    assert options.flags["trace"] == str(tmp_path / "t")


def test_requests_are_drawn_with_temperature_and_top_p() -> None:
    params = parse(["--temperature", "0.8", "--top-p", "0.9"]).load.send.params
    assert (params.temperature, params.top_p) == (0.8, 0.9)
    assert parse([]).load.send.params.top_p is None


def test_limits_make_a_goodput() -> None:
    options = parse(["--goodput", "ttft:200", "e2el:5000"])
    assert options.output.slo == Slo(ttft_ms=200.0, e2el_ms=5000.0)
    assert not parse([]).output.slo


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-requests 0", "num_requests must be positive"),
        ("--max-new-tokens -1", "max_new_tokens must be positive"),
        ("--max-batch-size 0", "max_batch_size must be positive"),
        ("--prefill-max-batch-size 0", "prefill_max_batch_size must be positive"),
        ("--top-p 0", "top_p must be above 0, and at most 1"),
        ("--top-p 1.5", "top_p must be above 0, and at most 1"),
        ("--submit-interval-ms -1", "submit_interval_ms must be 0 or more"),
        ("--submit-interval-ms nan", "submit_interval_ms must be 0 or more"),
        ("--num-clients 0", "num_clients must be positive"),
        ("--seed -1", "seed must be from 0"),
        ("--random-input-len 4 --prompt x", "leave --prompt"),
        ("--details", "--details has no effect without --json: add it"),
        ("--trace t --num-requests 4 --turns 2",
         "--num-requests, --turns would have no effect beside --trace: leave --num-requests and"),
        ("--trace /no/such/t", "/no/such/t cannot be read: No such file"),
        ("--save-trace t", "--save-trace has no effect without --trace or --random-input-len or"),
        ("--pretok --save-trace /no/such/t", "there is no directory"),
        ("--burstiness 2", "--burstiness has no effect without --request-rate"),
        ("--request-rate 0", "request_rate must be positive"),
        ("--request-rate fast", "invalid float value"),
        ("--request-rate 5 --submit-interval-ms 20", "leave --submit-interval-ms out"),
        ("--max-concurrency 5 --submit-interval-ms 20", "leave --submit-interval-ms out"),
        ("--max-concurrency 0", "max_concurrency must be positive"),
        ("--turns 2", "--turns has no effect without --random-input-len"),
        ("--think-time 2", "--think-time has no effect without --turns or --max-concurrency"),
        ("--prefix-groups 2 --prefix-len 4", "no effect without --random-input-len"),
        ("--prefix-groups 2 --random-input-len 4", "prefix_groups and prefix_len go together"),
        ("--prefix-len 2 --random-input-len 4", "no effect without --prefix-groups"),
        ("--max-new-tokens some", "max_new_tokens is 'some': it must be N, LOW:HIGH"),
        ("--random-input-len 0", "random_input_len must be positive"),
        ("--goodput ttft:0", "goodput is .ttft:0.: a limit is ttft, tpot or e2el"),
        ("--json /no/such/place/x.json", "there is no directory"),
        ("--plot run.jpeg2", r"--plot run.jpeg2: it must end in \.png, "),
        ("--endpoint tcp://127.0.0.1:7777 --page-size 4", "--page-size would have no effect"),
        ("--endpoint nowhere", "must be tcp://"),
        ("--num-req 3", "no flag --num-req; near it: --num-requests"),
        ("--submit-schedule sometimes", "invalid choice"),
    ],
)  # fmt: skip
def test_bad_flags_get_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags.split())
    assert main(flags.split()) == EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unreachable_endpoint_is_one_line_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.serving.CONNECT_TIMEOUT_S", 0.1)
    assert main(["--endpoint", f"tcp://127.0.0.1:{free_port()}"]) == EXIT_NO_SERVER
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no answer from" in error


@pytest.mark.parametrize("command", [["-m", "bench.serving"], ["bench/serving.py"]])
def test_the_bench_starts_as_a_module_and_as_a_script(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command, "--help-all"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
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
