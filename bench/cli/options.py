"""What a command line of `bench.serving` means: the server, the load and what is measured."""

import dataclasses
import json
import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cli.flags import SWITCHES, read_flags, server_flags_in
from bench.cli.load_flags import trace_spec
from bench.cli.output_flags import result_file
from bench.client.transport import DEFAULT_BASE_URL, OpenAIServer
from bench.load.datasets import read_sharegpt, sample
from bench.load.mooncake import read_requests
from bench.load.tokenizing import tokenizer_of
from bench.load.trace import TraceRequest, TraceSpec, generate
from bench.load.workload import DEFAULT_PROMPT, Workload
from bench.metrics.metrics import Slo
from quadriga.config import server_config as server_flags
from quadriga.config.server_config import ModelArgs, ServerConfig
from quadriga.errors import ConfigError
from quadriga.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Options:
    """One bench, validated.

    server: the bench's own server; None: the one at `endpoint` is measured, or `openai`.
    curve_dir: the keys with which the bench connects, its own server's or a client's; "": none.
    model: as given on the command line, or "". tokenizer: likewise, where the model's is not it.
    spell: random token ids are sent as a text of as many tokens.
    spec: what the workload's requests were generated from; None: they are from a trace file.
    gap: seconds between two submits; None: by the clock. limit: requests under way at a time, of an
    arrival rate; None: any number.
    """

    endpoint: str
    openai: OpenAIServer | None
    server: ServerConfig | None
    curve_dir: str
    model: str
    tokenizer: str
    spell: bool
    workload: Workload
    spec: TraceSpec | None
    gap: float | None
    limit: int | None
    params: SamplingParams
    truncate: bool | None
    pretok: bool
    warmup_runs: int
    repeat_runs: int
    slo: Slo
    asked: tuple[str, ...]
    json_path: Path | None
    details: bool
    result_path: Path | None
    output_details: bool
    plot: Path | None
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
        ServerConfig().replace(endpoint=endpoint, insecure=True).validate()
    spec = _spec(arguments) if arguments.trace is None else None
    if arguments.dataset_name == "sharegpt" and spec is not None:
        workload = _conversations(arguments, spec, server)
    else:
        workload = _workload(arguments, spec)
    if openai is not None:
        _refuse_what_openai_cannot(arguments, workload)
    return Options(
        endpoint=endpoint,
        openai=openai,
        server=server,
        curve_dir=server.frontend.curve_dir if server else server_given.get("curve_dir", ""),
        model=server_given.get("model", ""),
        tokenizer=arguments.tokenizer,
        spell=arguments.prompt_form == "text",
        workload=workload,
        spec=spec,
        gap=_gap(arguments),
        limit=arguments.max_concurrency if arguments.request_rate < math.inf else None,
        params=SamplingParams(
            temperature=arguments.temperature,
            seed=arguments.seed,
            ignore_eos=arguments.no_stop_on_eos,
        ),
        truncate=True if arguments.truncate else None,
        pretok=arguments.pretok,
        warmup_runs=arguments.warmup_runs,
        repeat_runs=arguments.repeat_runs,
        slo=Slo.parse(arguments.goodput),
        asked=tuple(name for name in SWITCHES if getattr(arguments, name, False)),
        json_path=arguments.json,
        details=arguments.details,
        result_path=result_file(arguments),
        output_details=arguments.output_details,
        plot=arguments.plot,
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
    """An absolute schedule is a rate, and an even one. Beside a rate, --max-concurrency makes no
    closed loop."""
    values = vars(arguments)
    if arguments.request_rate < math.inf:
        values = values | {"max_concurrency": None}
    if arguments.submit_schedule == "absolute" and arguments.submit_interval_ms > 0:
        rate = 1000 / arguments.submit_interval_ms
        values = values | {"request_rate": rate, "burstiness": math.inf}
    return trace_spec(values)


def _workload(arguments: Namespace, spec: TraceSpec | None) -> Workload:
    text = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    sends_ids = spec is None or spec.input_len is not None
    return Workload(
        requests=read_requests(arguments.trace) if spec is None else list(generate(spec)),
        text=None if sends_ids else " ".join([text] * arguments.prompt_repeats),
        unique=arguments.unique_prompts,
        repeat=arguments.same_prompts,
        seed=arguments.seed,
    )


def _conversations(arguments: Namespace, spec: TraceSpec, server: ServerConfig | None) -> Workload:
    """Prompts of a file, each with an answer as long as the file's unless --max-new-tokens says
    how long. ConfigError, ModelError where no tokenizer is at hand to count them."""
    named = arguments.tokenizer or getattr(arguments, "model", "")
    if not named and server is None:
        raise ConfigError("--dataset-name sharegpt counts tokens: add --tokenizer MODEL")
    model = ModelArgs(model=named) if server is None else server.model
    tokenizer = tokenizer_of(arguments.tokenizer, model)
    samples = sample(
        read_sharegpt(arguments.dataset_path),
        arguments.num_requests,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        arguments.seed,
    )
    requests: list[TraceRequest] = list(generate(spec))
    if arguments.file_lengths:
        requests = [
            dataclasses.replace(request, max_new_tokens=chosen.answer_tokens)
            for request, chosen in zip(requests, samples, strict=True)
        ]
    return Workload(
        requests,
        text=[chosen.prompt for chosen in samples],
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
