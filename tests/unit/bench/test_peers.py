"""The comparison with other servers: order of the runs, tables, and the models' files."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from bench.cli.command import EXIT_USAGE
from bench.cli.options import parse
from bench.client.load_generator import RequestRecord
from bench.peers import comparison as bench_contest
from bench.peers import models, recipes
from bench.peers.__main__ import main
from bench.peers.comparison import NotMeasured, Outcome, Settings, append, contest, read, table
from bench.peers.models import Checkpoint, Field, Weights
from bench.peers.recipes import PEERS, WORKLOADS, Peer, PeerWorkload, Start, environment
from bench.report.metrics import Summary, summarize
from quadriga.errors import ConfigError
from tests.tiny_models import tiny_llama
from tests.unit.bench.fake_peer import SERVER, Vocabulary, fake

SMALL = PeerWorkload("T1", "smollm2", 4, 3, concurrency=2, num_requests=4)
SMALLER = PeerWorkload("T2", "smollm2", 4, 2, concurrency=2, num_requests=2)


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the models by paths that do not exist."""
    for module in (recipes, bench_contest):
        monkeypatch.setattr(module, "hugging_face_directory", lambda model: tmp_path / model)
        monkeypatch.setattr(module, "gguf_file", lambda model, weights: tmp_path / model / weights)


def compare(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *workloads: PeerWorkload
) -> list[Outcome | NotMeasured]:
    """Compare a peer with a fake server in place of Quadriga."""

    def own_launch(weights: Weights, settings: Settings) -> Callable[[PeerWorkload], Any]:
        return bench_contest._peer_launch(fake("whole"), weights, settings)

    async def collect() -> list[Outcome | NotMeasured]:
        settings = Settings(
            "zmq",
            (),
            warmup_runs=1,
            repeat_runs=2,
            logs=tmp_path,
            directory_of=lambda model: tmp_path / model,
        )
        return [found async for found in contest(peer, "bf16", workloads, settings)]

    monkeypatch.setattr(bench_contest, "_own_launch", own_launch)
    monkeypatch.setattr("bench.cli.options.tokenizer_of", lambda *_: Vocabulary())
    return asyncio.run(collect())


async def first(outcomes: AsyncIterator[Outcome | NotMeasured]) -> Outcome | NotMeasured:
    return await anext(outcomes)


@pytest.mark.timeout(60)
def test_both_serve_in_turns_and_one_server_does_for_two_workloads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_models: None,
) -> None:
    found = compare(fake("whole"), tmp_path, monkeypatch, SMALL, SMALLER)
    assert [(len(o.ours), len(o.theirs)) for o in found if isinstance(o, Outcome)] == [(2, 2)] * 2
    turns = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert turns[:6] == [
        *("T1 warm-up 1 ours", "T1 warm-up 1 fake", "T1 run 1 ours", "T1 run 1 fake"),
        *("T1 run 2 ours", "T1 run 2 fake"),
    ]
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["fake-T1.log", "ours-T1.log"]


@pytest.mark.timeout(60)
def test_a_run_with_a_failed_request_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_models: None
) -> None:
    (found,) = compare(fake("short"), tmp_path, monkeypatch, SMALL)
    assert isinstance(found, NotMeasured)
    assert "T1 warm-up 1 fake: 4 of 4 requests failed: RequestFailed: 2 tokens" in str(found)


def test_weights_that_a_peer_cannot_serve_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings("zmq", (), 1, 1, tmp_path)
    with pytest.raises(ConfigError, match="vllm does not serve q4_0 weights, only bf16"):
        asyncio.run(first(contest(PEERS["vllm"], "q4_0", [SMALL], settings)))


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=str)
def test_a_workload_is_a_load_of_the_bench_client(workload: PeerWorkload) -> None:
    options = parse(workload.flags())
    assert len(options.load.workload.requests) == workload.num_requests
    assert {request.num_own_tokens for request in options.load.workload.requests} == {
        workload.input_len
    }
    assert options.load.send.params.ignore_eos


@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_peer_is_asked_for_at_its_port_by_flags_that_the_bench_knows(
    name: str, no_models: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path))
    peer = PEERS[name]
    start = Start(Path("/env/bin/python"), 4711, WORKLOADS["W2"], peer.weights[0])
    assert "4711" in peer.command(start)
    target = parse(peer.target(4711, "/models/m")).target.openai
    assert target is not None
    assert (target.base_url, target.model) == ("http://127.0.0.1:4711", "/models/m")
    assert set(peer.weights) <= set(get_args(Weights))


def test_an_installation_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"/bin/false -m venv .* failed"):
        environment("peer", ["nothing"])


# --- tables ---------------------------------------------------------------------------------------


def summary(seconds: float) -> Summary:
    """Return the summary of one request of 11 tokens."""
    record = RequestRecord(0, 100.0, 100.0, finished=100.0 + seconds, completion_tokens=11)
    record.arrivals = [100.0 + seconds * share for share in (0.5, 1.0)]
    return summarize([record], 0.0)


def test_the_table_has_medians_and_the_ratios_of_neighbours() -> None:
    ours, theirs = [summary(1.0), summary(2.0), summary(4.0)], [summary(2.0)] * 3
    line = table([Outcome("llama-cpp", "bf16", "W2", "zmq", ours, theirs)]).splitlines()[2]
    assert line == (
        "| W2 | llama-cpp | bf16 | 6 / 6 = 1.00 x (0.50 to 2.00)"
        " | 1000 / 1000 = 1.00 x (0.50 to 2.00) | 1000 / 1000 = 1.00 x (0.50 to 2.00)"
        " | 100.0 / 100.0 = 1.00 x (0.50 to 2.00) |"
    )


def test_results_of_several_days_are_kept_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    outcome = Outcome("vllm", "bf16", "W1", "zmq", [summary(1.0)], [summary(2.0)])
    append(path, outcome)
    append(path, outcome)
    assert table(read(path)) == table([outcome, outcome])
    path.write_text("no JSON")
    with pytest.raises(ConfigError, match="holds no results"):
        read(path)


# --- the models' files ----------------------------------------------------------------------------


def tiny_checkpoint(tokenizer_dir: Path) -> Checkpoint:
    """Return a model of two Llama-like layers with rows of 32 values."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    random = np.random.default_rng(0)
    shapes = {"token_embd": (6, 32), "output_norm": (32,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_q": (32, 32), f"blk.{layer}.attn_k": (16, 32)}
    tensors = {
        f"{name}.weight": random.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }
    return Checkpoint("llama", {}, tensors, config | {"vocab_size": 6}, tokenizer_dir)


def test_a_directory_has_the_same_weights_under_the_other_names(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    vocabulary = {"a": 0, "b": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    made = tmp_path / "made"
    made.mkdir()
    checkpoint = tiny_checkpoint(tmp_path)
    models._write_directory(checkpoint, made)
    header, tensors = read_safetensors(made / "model.safetensors")
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
    assert len(tensors) == 6
    query = checkpoint.tensors["blk.1.attn_q.weight"]
    stored = tensors["model.layers.1.self_attn.q_proj.weight"]
    # In the second head, the second value of the first pair is the first of the second half.
    np.testing.assert_allclose(stored[8 + 4], query[8 + 1], rtol=0.01)
    np.testing.assert_allclose(stored[8 + 1], query[8 + 2], rtol=0.01)
    tokens = json.loads((made / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(tokens.values()) == list(range(6))


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return header and float32 tensors of a file in bfloat16."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            bits = np.frombuffer(data[end + first : end + last], np.uint16).astype(np.uint32) << 16
            tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return header, tensors


@pytest.mark.parametrize(("weights", "kind"), [("bf16", "BF16"), ("q4_0", "Q4_0")])
def test_a_gguf_has_matrices_as_asked_and_vectors_in_full(
    tmp_path: Path, weights: Weights, kind: str
) -> None:
    from gguf import GGUFReader, GGUFValueType

    checkpoint = tiny_checkpoint(tmp_path)
    field = Field("fine", GGUFValueType.STRING)
    checkpoint = Checkpoint(
        "llama", {"general.name": field}, checkpoint.tensors, checkpoint.config, tmp_path
    )
    path = tmp_path / "model.gguf"
    models._write_gguf(checkpoint, weights, path)
    reader = GGUFReader(path)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == kind
    assert kinds["output_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == ("Q8_0" if weights == "q4_0" else kind)
    assert reader.fields["general.name"].contents() == "fine"


def test_further_flags_of_a_peer_end_its_command_line(tmp_path: Path, no_models: None) -> None:
    settings = Settings("zmq", (), 1, 1, tmp_path, peer_flags=("--spec-type", "ngram-simple"))
    launch = bench_contest._peer_launch(fake("whole"), "bf16", settings)(SMALL)
    assert launch.key[-3:] == ["whole", "--spec-type", "ngram-simple"]


def test_further_flags_of_a_peer_go_to_one_peer_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", "llama-cpp", "--peer-flags=--spec-type none"]) == EXIT_USAGE
    assert "name one" in capsys.readouterr().err


# --- on a device ----------------------------------------------------------------------------------


def test_servers_that_are_not_installed_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homes = [f"--home={name}={tmp_path}" for name in recipes.ON_DEVICE]
    model = tiny_llama(tmp_path)
    assert main(["--device", "cpu", "--model", str(model), *homes]) == 0
    output = capsys.readouterr().out
    assert f"sglang is left out: {tmp_path} has no server of this name" in output
    assert "nothing to compare with" in output
    assert main(["--device", "cpu", "--model", str(tmp_path / "none")]) == EXIT_USAGE


@pytest.mark.parametrize("name", sorted(recipes.ON_DEVICE))
def test_peers_are_found_in_environments_and_serve_the_same_model(
    name: str, tmp_path: Path
) -> None:
    package, command_line = recipes.ON_DEVICE[name]
    (tmp_path / f"lib/python3.12/site-packages/{package}").mkdir(parents=True)
    assert not recipes.is_in(tmp_path, name)
    (tmp_path / f"lib/python3.12/site-packages/{package}/__init__.py").touch()
    assert recipes.is_in(tmp_path, name)
    peer = recipes.peer_on("cuda", name, tmp_path, Path("/models/gpt2"))
    command = peer.command(Start(peer.install(), 8123, SMALL, "bf16"))
    assert command[0] == str(tmp_path / "bin" / command_line.split()[0])
    assert {"/models/gpt2", "8123", "127.0.0.1"} <= set(command)


@pytest.mark.timeout(60)
def test_a_server_of_an_environment_takes_turns_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, program = tmp_path / "lib/python3.12/site-packages/vllm", tmp_path / "bin/vllm"
    for path in (package / "__init__.py", program):
        path.parent.mkdir(parents=True)
        path.touch(0o755)
    port = "import sys\nsys.argv[1:] = [sys.argv[sys.argv.index('--port') + 1], 'whole']\n"
    program.write_text(f"#!{sys.executable}\n{port}{SERVER}")
    monkeypatch.setattr(
        bench_contest,
        "_own_launch",
        lambda weights, settings: bench_contest._peer_launch(fake("whole"), weights, settings),
    )
    monkeypatch.setattr("bench.cli.options.tokenizer_of", lambda *_: Vocabulary())
    flags = ["vllm", "--device", "cpu", "--model", str(tiny_llama(tmp_path / "model"))]
    flags += ["--home", f"vllm={tmp_path}", "--load", "4", "2", "2", "2"]
    results = tmp_path / "peers.jsonl"
    flags += ["--warmup-runs", "0", "--repeat-runs", "1", "--results", str(results)]
    assert main(flags) == 0
    (outcome,) = read(results)
    assert (outcome.peer, outcome.over) == ("vllm", "openai")
    assert outcome.ours[0].throughput and outcome.theirs[0].throughput
    assert "| vllm | bf16 |" in capsys.readouterr().out


def test_a_server_that_is_measured_on_a_device_only_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sglang"]) == EXIT_USAGE
    assert "sglang is measured with --device: add it" in capsys.readouterr().err
