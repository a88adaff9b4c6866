"""What a command line of `bench.serving` means: the server, the load and what is measured."""

import json
import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.flags import SWITCHES, read_flags, server_flags_in
from bench.load_flags import trace_spec
from bench.metrics import Slo
from bench.trace import TraceSpec, generate, read_trace
from bench.transport import DEFAULT_BASE_URL, OpenAIServer
from bench.workload import DEFAULT_PROMPT, Workload
from quadriga import config as server_flags
from quadriga.config import ServerConfig
from quadriga.errors import ConfigError
from quadriga.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Options:
    """One bench, validated.

    server: the bench's own server; None: the one at `endpoint` is measured, or `openai`.
    model: as given on the command line, or "". tokenizer: likewise, where the model's is not it.
    spell: random token ids are sent as a text of as many tokens.
    spec: what the workload's requests were generated from; None: they are from a trace file.
    gap: seconds between two submits; None: by the clock.
    """

    endpoint: str
    openai: OpenAIServer | None
    server: ServerConfig | None
    model: str
    tokenizer: str
    spell: bool
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
    openai = _openai(arguments) if arguments.backend == "openai" else None
    endpoint = server_given.get("endpoint", "")
    own = openai is None and not endpoint
    server = server_flags.from_namespace(arguments) if own else None
    if endpoint:
        ServerConfig().replace(endpoint=endpoint).validate()
    spec = _spec(arguments) if arguments.trace is None else None
    workload = _workload(arguments, spec)
    if openai is not None:
        _refuse_what_openai_cannot(arguments, workload)
    return Options(
        endpoint=endpoint,
        openai=openai,
        server=server,
        model=server_given.get("model", ""),
        tokenizer=arguments.tokenizer,
        spell=arguments.prompt_form == "text",
        workload=workload,
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


def _openai(arguments: Namespace) -> OpenAIServer:
    url = arguments.base_url or DEFAULT_BASE_URL
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url is {url!r}: it must begin with http:// or https://")
    try:
        extra = json.loads(arguments.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body is {arguments.extra_body}: it must be a JSON object")
    chat = arguments.openai_endpoint == "chat"
    if chat and arguments.random_input_len and arguments.prompt_form == "ids":
        raise ConfigError("--openai-endpoint chat takes texts only: add --prompt-form text")
    model = getattr(arguments, "model", "")
    return OpenAIServer(url.removesuffix("/v1"), model, arguments.openai_endpoint, extra)


def _refuse_what_openai_cannot(arguments: Namespace, workload: Workload) -> None:
    if arguments.truncate:
        raise ConfigError("--backend openai cannot ask a server to truncate: leave --truncate out")
    if any(request.priority or request.predecessor is not None for request in workload.requests):
        raise ConfigError(
            "--backend openai knows neither priorities nor the token ids of an answer, which the"
            " next turn of a chat needs: leave --turns out, or take another trace"
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
