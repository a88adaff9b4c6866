"""What a command line of `bench.serving` means: the server, the load and what is measured."""

import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.flags import SWITCHES, read_flags, server_flags_in
from bench.load_flags import trace_spec
from bench.metrics import Slo
from bench.trace import TraceSpec, generate, read_trace
from bench.workload import DEFAULT_PROMPT, Workload
from quadriga import config as server_flags
from quadriga.config import ServerConfig
from quadriga.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Options:
    """One bench, validated.

    server: the bench's own server; None: the one at `endpoint` is measured.
    model: as given on the command line, or "".
    spec: what the workload's requests were generated from; None: they are from a trace file.
    gap: seconds between two submits; None: by the clock.
    """

    endpoint: str
    server: ServerConfig | None
    model: str
    workload: Workload
    spec: TraceSpec | None
    gap: float | None
    params: SamplingParams
    truncate: bool | None
    pretok: bool
    warmup_runs: int
    repeat_runs: int
    slo: Slo
    asked: tuple[str, ...]
    json_path: Path | None
    details: bool
    save_trace: Path | None
    server_log: Path | None
    flags: dict[str, Any]


def parse(argv: list[str]) -> Options:
    """The options of a command line. ConfigError for flags that cannot work."""
    arguments = read_flags(argv)
    server_given = server_flags_in(arguments)
    own = "endpoint" not in server_given
    server = server_flags.from_namespace(arguments) if own else None
    if not own:
        ServerConfig().replace(endpoint=arguments.endpoint).validate()
    spec = _spec(arguments) if arguments.trace is None else None
    return Options(
        endpoint="" if own else arguments.endpoint,
        server=server,
        model=server_given.get("model", ""),
        workload=_workload(arguments, spec),
        spec=spec,
        gap=_gap(arguments),
        params=SamplingParams(
            temperature=arguments.temperature,
            seed=arguments.seed,
            ignore_eos=arguments.no_stop_on_eos,
        ),
        truncate=True if arguments.truncate else None,
        pretok=arguments.pretok,
        warmup_runs=arguments.warmup_runs,
        repeat_runs=arguments.repeat_runs,
        slo=Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms),
        asked=tuple(name for name in SWITCHES if getattr(arguments, name, False)),
        json_path=arguments.json,
        details=arguments.details,
        save_trace=arguments.save_trace,
        server_log=arguments.server_log,
        flags={name: _as_json(value) for name, value in vars(arguments).items()},
    )


def _spec(arguments: Namespace) -> TraceSpec:
    """An absolute schedule is a rate, and an even one."""
    values = vars(arguments)
    if arguments.submit_schedule == "absolute" and arguments.submit_interval_ms > 0:
        rate = 1000 / arguments.submit_interval_ms
        values = values | {"request_rate": rate, "burstiness": math.inf}
    return trace_spec(values)


def _workload(arguments: Namespace, spec: TraceSpec | None) -> Workload:
    text = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    sends_ids = spec is None or spec.input_len is not None
    return Workload(
        requests=read_trace(arguments.trace) if spec is None else list(generate(spec)),
        text=None if sends_ids else " ".join([text] * arguments.prompt_repeats),
        unique=arguments.unique_prompts,
        repeat=arguments.same_prompts,
        seed=arguments.seed,
    )


def _gap(arguments: Namespace) -> float | None:
    """Only an interval that is relative to the submit before is no matter of the clock."""
    by_the_clock = (
        arguments.trace is not None
        or arguments.request_rate < math.inf
        or arguments.max_concurrency is not None
        or arguments.submit_schedule == "absolute"
    )
    return None if by_the_clock else float(arguments.submit_interval_ms / 1000)


def _as_json(value: Any) -> Any:
    """JSON knows no paths and nothing infinite."""
    plain = not isinstance(value, Path) and value != math.inf
    return value if plain else str(value)
