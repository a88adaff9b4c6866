"""The JSON of other bench clients, the timeline and the plot."""

import json
import sys
from pathlib import Path

import pytest

import bench.report
from bench.cli.command import EXIT_USAGE
from bench.cli.options import parse
from bench.client.load_generator import RequestRecord
from bench.client.resources import Cost
from bench.report import files as sglang_format
from bench.report.files import append_json
from bench.report.metrics import awaiting_first_token, in_flight, summarize, token_rates
from bench.report.report import Result
from bench.serving import main
from quadriga.programs import install_command

NO_COST = Cost(None, None, None, None, {})


def record(index: int, start: float, **changes: object) -> RequestRecord:
    """Return a record: a token after 100 ms, a chunk of two 200 ms later, the end 10 ms later."""
    first, last = start + 0.1, start + 0.3
    fields = {"submit_end": start, "finished": last + 0.01, "arrivals": [first, last, last],
              "chunks": [first, last], "prompt_tokens": 7, "completion_tokens": 3}  # fmt: skip
    return RequestRecord(index, start, **(fields | changes))  # type: ignore[arg-type]


def result(flags: str = "", failed: bool = False) -> Result:
    records = [record(0, 100.0), record(1, 100.2), record(2, 101.0)]
    if failed:
        records[2].error = "RequestFailed: broke"
    summary = summarize(records, 0.0, parse(flags.split()).output.slo)
    return Result(summary, NO_COST, records, {"model": "m"})


def test_the_definitions_are_the_conventional_ones() -> None:
    found = sglang_format.figures(result(), parse([]).output.slo)
    assert found["median_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(105), "to the end, over the tokens but one"
    assert found["mean_itl_ms"] == pytest.approx(200), "between chunks, not tokens"
    assert found["p99_e2e_latency_ms"] == pytest.approx(310)
    assert found["duration"] == pytest.approx(1.31)
    assert found["max_concurrent_requests"] == 2
    assert found["concurrency"] == pytest.approx(3 * 0.31 / 1.31)
    assert found["max_output_tokens_per_s"] == pytest.approx(6)
    assert found["total_token_throughput"] == pytest.approx(30 / 1.31)
    assert "request_goodput" not in found


def test_each_run_is_a_line_with_the_conventional_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    options = parse(f"--num-prompts 3 --output-file {path} --output-details".split())
    assert options.output.result_path == path
    for failed in (False, True):
        document = sglang_format.document(options, result(failed=failed), "today")
        append_json(path, [document])
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["completed"], first["total_input_tokens"], first["model_id"]) == (3, 21, "m")
    assert (first["request_rate"], first["median_e2el_ms"]) == ("inf", pytest.approx(310))
    assert first["itls"][0] == pytest.approx([0.2])
    assert (second["completed"], second["failed"]) == (2, 1)
    assert second["errors"][2] == "RequestFailed: broke"


def test_a_result_can_name_its_file_itself() -> None:
    path = parse(
        ["--save-result", "--request-rate", "5", "--model", "some/gpt2"]
    ).output.result_path
    assert path is not None
    assert path.name.startswith("zmq-5qps-gpt2-") and path.suffix == ".json"


def test_a_run_in_which_nothing_finished_has_figures_too() -> None:
    records = [RequestRecord(0, 100.0, 100.0, finished=101.0, error="x")]
    nothing = Result(summarize(records, 0.0), NO_COST, records, {})
    found = sglang_format.figures(nothing, parse([]).output.slo)
    assert (found["completed"], found["output_throughput"], found["p99_itl_ms"]) == (0, 0, 0)


def test_the_timeline_knows_who_was_there_at_each_moment() -> None:
    records = result().records
    assert in_flight(records).values == [1, 2, 1, 0, 1, 0]
    assert awaiting_first_token(records).peak == 1
    rates = token_rates(records, 100.0, 101.5, 1.0)
    assert rates == pytest.approx([6, 3])


def test_chunks_without_token_ids_stand_for_their_share_of_the_tokens() -> None:
    doubled = record(0, 100.0, completion_tokens=6)
    assert sum(token_rates([doubled], 100.0, 101.0, 1.0)) == pytest.approx(6)


@pytest.mark.parametrize("records", [0, 1, 3])
def test_a_run_is_drawn_however_little_there_is_of_it(tmp_path: Path, records: int) -> None:
    pytest.importorskip("matplotlib")
    from bench.report.plots import draw_run

    draw_run(tmp_path / "run.png", result().records[:records], ["title"])
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "bench.report.plots", raising=False)
    monkeypatch.delattr(bench.report, "plots", raising=False)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--plot", "run.png"]) == EXIT_USAGE
    assert install_command("plot") in capsys.readouterr().err
