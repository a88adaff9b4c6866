"""The simulator: the real scheduler in simulated time, with a small cost model."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import bench.report
import bench.simulate
from bench.load.synthetic import Lengths
from bench.simulate import __main__ as command
from quadriga.programs import install_command
from quadriga.server.config.engine_args import BY_LOAD, IN_TURN
from quadriga.server.config.server_config import ServerConfig
from simulator import cost_model, trace
from simulator.clock import START
from simulator.latency import Slo
from simulator.replica import draw_ids
from simulator.report import Figures, figures
from simulator.trace import TraceRequest
from simulator.world import MAX_SAMPLES, World
from tests.unit.bench.simulated_requests import MODEL, PAGE, VOCABULARY, request, requests


def world_of(num_pages: int = 1000, replicas: int = 1, **flags: Any) -> World:
    method = flags.pop("load_balance_method", IN_TURN)
    config = ServerConfig().replace(**{"page_size": PAGE, "max_batch_size": 8, **flags})
    return World(config, MODEL, num_pages, replicas, method)


def run(world: World, requests: Iterable[TraceRequest], slo: Slo | None = None) -> Figures:
    world.run(enumerate(requests))
    for replica in world.replicas:
        replica.scheduler.check()
        assert replica.info["pages_held"] == 0
    return figures(world, MODEL.delays_ms.delivery, slo or Slo(), wall=1.0)


def test_a_pool_serves_more_requests_of_a_model_with_a_window() -> None:
    config = ServerConfig().replace(page_size=PAGE, max_batch_size=8)
    durations = []
    for window in (0, 16):
        on = msgspec.structs.replace(MODEL.measured_on, window=window)
        world = World(config, msgspec.structs.replace(MODEL, measured_on=on), 40)
        found = run(world, [request(prompt=8, output=100) for _ in range(8)])
        durations.append(found.duration)
    assert durations[1] < durations[0] / 2


def test_adapters_take_time_in_steps_and_wait_for_places() -> None:
    config = ServerConfig().replace(page_size=PAGE, max_batch_size=8)
    costs = cost_model.AdapterCosts(step=1.0, each=2.0, load=100.0)
    model = msgspec.structs.replace(MODEL, adapters_ms=costs)
    load = [msgspec.structs.replace(request(), adapter=f"a{i % 4}") for i in range(16)]
    found = {}
    for places in (2, 4):
        world = World(config.replace(max_loras=places), model, 1000)
        found[places] = run(world, load)
        info = world.replicas[0].info["adapters"]
        assert info["loads"] >= 4 and info["load_seconds"] == pytest.approx(0.1 * info["loads"])
    plain = run(World(config, model, 1000), [request() for _ in load])
    assert plain.duration < found[4].duration - 0.1 < found[2].duration


def test_a_lone_request_pays_for_the_way_its_prefill_and_its_decodes() -> None:
    world = world_of(plan_at_once=True)
    found = run(world, [request()])
    assert found.ttft is not None and found.tpot is not None and found.latency is not None
    assert found.ttft.p50 == pytest.approx(3 + 0.5 + 18 + 2)
    assert found.tpot.p50 == pytest.approx(11.25)
    assert found.latency.p50 == pytest.approx(found.ttft.p50 + 4 * 11.25)
    assert (found.steps, found.completion_tokens, found.prompt_tokens) == (5, 5, 8)


def test_a_plan_made_as_late_as_can_be_is_still_in_time() -> None:
    at_once = run(world_of(plan_at_once=True), [request(output=40)])
    late = run(world_of(), [request(output=40)])
    assert late.itl is not None and at_once.itl is not None
    assert late.itl.p50 == pytest.approx(at_once.itl.p50)


def test_every_request_gets_all_its_tokens() -> None:
    sent = requests(300, request_rate=40.0)
    found = run(world_of(), sent)
    assert found.failed == 0
    assert found.requests == 300
    assert found.prompt_tokens == sum(request.num_own_tokens for request in sent)
    assert found.completion_tokens == sum(request.max_new_tokens for request in sent)
    assert found.itl is not None
    assert found.itl.count == found.completion_tokens - 300


def test_the_same_load_gives_the_same_figures() -> None:
    sent = requests(100, request_rate=50.0, prefix_groups=5, prefix_len=12)
    assert run(world_of(num_pages=40), sent) == run(world_of(num_pages=40), sent)


def test_few_pages_make_requests_give_way_and_all_of_them_end() -> None:
    world = world_of(num_pages=20, schedule_conservativeness=0.01)
    found = run(world, requests(60, output_len=Lengths(20, 40)))
    assert found.failed == 0
    assert found.retractions > 0
    assert found.pages_peak > 0.9


def test_a_common_beginning_is_computed_once() -> None:
    sent = requests(50, prefix_groups=1, prefix_len=40, max_concurrency=1)
    assert run(world_of(), sent).cached_tokens >= 49 * 40
    assert run(world_of(disable_radix_cache=True), sent).cached_tokens == 0


def test_a_follower_is_sent_its_time_after_the_end() -> None:
    world = world_of()
    run(world, [request(), request(at=0.5, segment=1, follows=0, continues=False)])
    records = world.records
    assert records["submitted"][1] == pytest.approx(records["finished"][0] + 0.5)
    assert records["prompt_tokens"][1] == 8


def test_a_chat_goes_on_from_its_prompt_and_answer() -> None:
    world = world_of()
    sent = [request(), *(request(segment=n, follows=n - 1) for n in (1, 2))]
    run(world, sent)
    assert world.records["prompt_tokens"].tolist() == [8, 8 + 5 + 8, 2 * (8 + 5) + 8]
    assert world.records["cached_tokens"].tolist() == [0, 12, 24], "full pages of what is known"


def test_a_chat_ends_with_the_turn_that_is_too_long() -> None:
    sent = [request(), request(prompt=300, segment=1, follows=0), request(segment=2, follows=1)]
    assert run(world_of(), sent).errors == {"prompt_too_long": 1, "not_sent": 1}


def test_a_long_prompt_can_be_truncated_as_the_frontend_does_it() -> None:
    world = world_of(allow_auto_truncate=True)
    found = run(world, [request(prompt=300), request(segment=1, follows=0)])
    assert found.failed == 0
    assert world.records["prompt_tokens"].tolist() == [255, 255]


def test_a_full_queue_refuses_and_the_rest_is_served() -> None:
    found = run(world_of(max_queued_requests=10, max_running_requests=4), requests(100))
    assert found.errors.keys() == {"queue_full"}
    assert found.failed + found.request_rate * found.duration == pytest.approx(100)


def test_requests_that_wait_too_long_end_by_their_deadline() -> None:
    found = run(world_of(queue_timeout=0.2, max_running_requests=1), requests(30))
    assert found.errors.keys() == {"deadline_exceeded"}


def test_replicas_share_the_work_in_turn() -> None:
    one, two = world_of(), world_of(replicas=2)
    alone, shared = run(one, requests(200)), run(two, requests(200))
    assert alone.duration > 1.8 * shared.duration
    rows = [replica.worker.rows for replica in two.replicas]
    assert max(rows) < 1.2 * min(rows)


def test_the_least_loaded_replica_gets_the_next_request() -> None:
    """Every other request is long, so that one of two replicas in turn gets all of these."""
    sent = [request(at=n / 100, output=100 if n % 2 else 2, segment=n) for n in range(60)]
    in_turn = run(world_of(replicas=2), sent)
    least_loaded = run(world_of(replicas=2, load_balance_method=BY_LOAD), sent)
    assert least_loaded.duration < 0.8 * in_turn.duration


def test_only_requests_within_the_limits_are_goodput() -> None:
    sent = [request(at=5.0 * n, prompt=8 if n < 3 else 200, segment=n) for n in range(4)]
    found = run(world_of(), sent, Slo(ttft_ms=100, tpot_ms=50))
    assert found.goodput is not None
    assert (found.goodput.requests, found.goodput.share) == (3, 0.75)


def test_arrivals_at_one_moment_are_one_batch() -> None:
    world = world_of()
    found = run(world, [request(segment=n) for n in range(4)])
    assert found.steps == 5


def test_the_simulated_model_draws_from_the_vocabulary() -> None:
    seeds, positions = np.arange(100).repeat(100), np.tile(np.arange(100), 100)
    ids = draw_ids(seeds, positions, VOCABULARY)
    assert ids.min() >= trace.MIN_TOKEN_ID
    assert ids.max() < VOCABULARY
    assert len(np.unique(ids)) > 0.9 * (VOCABULARY - trace.MIN_TOKEN_ID)
    assert (draw_ids(seeds[:1], positions[:1], VOCABULARY) == ids[:1]).all()


def test_memory_of_samples_is_bounded() -> None:
    world = world_of()
    world._sample_interval = 1e-6
    run(world, requests(400))
    assert 100 < len(world.samples) <= MAX_SAMPLES
    times = [sample.time for sample in world.samples]
    assert times == sorted(times)
    assert times[0] >= START


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    cost_model.save(tmp_path / "model.json", MODEL)
    return tmp_path / "model.json"


def call(model_file: Path, *argv: str) -> int:
    return command.main(["--cost-model", str(model_file), "--num-pages", "1000", *argv])


def test_the_command_prints_the_figures_and_writes_them(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert call(model_file, "--num-requests", "20", "--json", str(out)) == 0
    assert "Requests: 20\n" in capsys.readouterr().out
    assert json.loads(out.read_text())["summary"]["completion_tokens"] == 20 * 32


def test_a_trace_file_is_run_whatever_the_order_of_its_lines(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    trace.write_trace(
        path, [request(at=3.0), request(at=1.0, segment=1), request(segment=2, follows=0)]
    )
    assert call(model_file, "--trace", str(path)) == 0
    assert "Requests: 3\n" in capsys.readouterr().out


def test_failed_requests_give_exit_code_one(model_file: Path) -> None:
    assert call(model_file, "--num-requests", "2", "--random-input-len", "500") == 1


def test_refused_requests_are_explained_and_have_no_latencies(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--num-requests 100 --request-rate inf --max-queued-requests 10 --max-running-requests 4"
    )
    assert call(model_file, *flags.split()) == 1
    out = capsys.readouterr().out
    assert "of 100 requests refused: queue_full; the servers finished" in out
    assert "give --request-rate" in out
    assert "TTFT" not in out


def test_the_default_load_has_a_rate_and_a_closed_loop_has_none(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(model_file, "--num-requests", "400") == 0
    rate = re.search(r"Request rate: (.*) requests/s", capsys.readouterr().out)
    assert rate is not None and 6 < float(rate.group(1)) < 10
    assert call(model_file, "--num-requests", "40", "--max-concurrency", "4") == 0


def test_help_shows_only_flags_that_change_a_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help-all"])
    out = capsys.readouterr().out
    assert "--max-batch-size" in out
    assert "--ssl-keyfile" not in out and "--api-key" not in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--device", "cpu"], "--device"),
        (["--trace", "t.jsonl", "--turns", "2"], "--turns"),
        (["--max-total-tokens", "512"], "--num-pages and --max-total-tokens"),
        (["--replicas", "0"], "replicas"),
        (["--random-input-len", "many"], "random_input_len"),
        (["--compare", "none.json"], "none.json"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(
    model_file: Path, argv: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(model_file, *argv) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_plot_without_matplotlib_says_what_to_install(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "bench.report.plots", raising=False)
    monkeypatch.delattr(bench.report, "plots", raising=False)  # if another test has imported it
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert call(model_file, "--plot", "run.png") == 2
    assert install_command("plot") in capsys.readouterr().err


def test_a_run_is_compared_with_the_medians_of_measured_ones(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, measured = tmp_path / "out.json", tmp_path / "run.json"
    call(model_file, "--num-requests", "20", "--json", str(out))
    summary = json.loads(out.read_text())["summary"]
    runs = [summary | {"throughput": summary["throughput"] * factor} for factor in (1, 2, 9)]
    measured.write_text(json.dumps({"runs": [{"summary": summary} for summary in runs]}))
    assert call(model_file, "--num-requests", "20", "--compare", str(measured)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("throughput")).endswith("ratio 0.500")
    assert next(line for line in lines if line.startswith("ttft p50")).endswith("ratio 1.000")
