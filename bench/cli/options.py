"""The meaning of a command line of `bench.serving`: the server, the load and the output."""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.cli.flags import PROG, SWITCHES, read_flags, result_file
from bench.cli.load_flags import server_flags_in, trace_spec
from bench.client.backends import DEFAULT_BASE_URL, OpenAIServer
from bench.client.load_generator import SendOptions
from bench.load.datasets import read_sharegpt, sample
from bench.load.mooncake import read_requests
from bench.load.synthetic import TraceSpec, generate
from bench.load.tokenizing import tokenizer_of
from bench.load.trace import TraceRequest
from bench.load.varied_texts import varied_texts
from bench.load.workload import DEFAULT_PROMPT, Workload
from bench.metrics.slo import Slo
from quadriga.config import server_config
from quadriga.config.model_args import ModelArgs
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError
from quadriga.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The server to measure: one that the bench starts, a running one, or an OpenAI-compatible one.

    Attributes:
        config: Flags of the server that the bench starts; None: a running one is measured.
        endpoint: Endpoint of a running Quadriga server, or "".
        openai: The OpenAI-compatible server, or None.
        curve_dir: Directory of the keys that the bench connects with, or "".
        model: Model as given on the command line, or "".
        tokenizer: Tokenizer as given on the command line, or "": the model's.
    """

    config: ServerConfig | None
    endpoint: str
    openai: OpenAIServer | None
    curve_dir: str
    model: str
    tokenizer: str
    server_log: Path | None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The requests of every run.

    Attributes:
        spec: What the requests were generated from; None: they come from a trace file.
        pretok: Texts are sent as token ids.
        spell: Random token ids are sent as a text of as many tokens.
    """

    workload: Workload
    spec: TraceSpec | None
    send: SendOptions
    pretok: bool
    spell: bool


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The figures and files of a bench; a path of None writes no file.

    Attributes:
        report: "table" or "classic".
        verbose: Print all figures.
    """

    slo: Slo
    report: str
    verbose: bool
    json_path: Path | None
    details: bool
    result_path: Path | None
    output_details: bool
    plot: Path | None
    save_trace: Path | None


@dataclass(frozen=True, slots=True)
class Options:
    """One bench, validated, with the SWITCHES that are `requested` and all flags as JSON.

    Attributes:
        short_warmup: A warm-up sends only a few requests, not a whole run.
    """

    target: TargetOptions
    load: LoadOptions
    output: OutputOptions
    warmup_runs: int
    short_warmup: bool
    repeat_runs: int
    requested: tuple[str, ...]
    flags: dict[str, Any]


def parse(argv: list[str], prog: str = PROG) -> Options:
    """Return the options of a command line, or raise ConfigError.

    `prog` is the command's name in --help.
    """
    arguments = read_flags(argv, prog)
    target = _target(arguments)
    return Options(
        target=target,
        load=_load(arguments, target),
        output=OutputOptions(
            slo=Slo.parse(arguments.goodput),
            report=arguments.report,
            verbose=arguments.verbose,
            json_path=arguments.json,
            details=arguments.details,
            result_path=result_file(arguments),
            output_details=arguments.output_details,
            plot=arguments.plot,
            save_trace=arguments.save_trace,
        ),
        warmup_runs=arguments.warmup_runs,
        short_warmup=arguments.short_warmup,
        repeat_runs=arguments.repeat_runs,
        requested=tuple(name for name in SWITCHES if getattr(arguments, name, False)),
        flags={name: _as_json(value) for name, value in vars(arguments).items()},
    )


# --- the server -----------------------------------------------------------------------------------


def _target(arguments: Namespace) -> TargetOptions:
    given = server_flags_in(arguments)
    openai = _openai(arguments) if arguments.backend == "openai" else None
    endpoint = given.get("endpoint", "")
    starts_one = openai is None and not endpoint
    config = server_config.from_namespace(arguments) if starts_one else None
    if endpoint:
        ServerConfig().replace(endpoint=endpoint, insecure=True).validate()
    return TargetOptions(
        config=config,
        endpoint=endpoint,
        openai=openai,
        curve_dir=config.frontend.curve_dir if config else given.get("curve_dir", ""),
        model=given.get("model", ""),
        tokenizer=given.get("tokenizer", ""),
        server_log=arguments.server_log,
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


# --- the load -------------------------------------------------------------------------------------


def _load(arguments: Namespace, target: TargetOptions) -> LoadOptions:
    spec = _spec(arguments) if arguments.trace is None else None
    if arguments.dataset_name == "sharegpt" and spec is not None:
        workload = _conversations(arguments, spec, target.config)
    else:
        workload = _workload(arguments, spec)
    if target.openai is not None:
        _check_openai_supports(arguments, workload)
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        ignore_eos=arguments.no_stop_on_eos,
    )
    return LoadOptions(
        workload=workload,
        spec=spec,
        send=SendOptions(
            params,
            gap_s=_gap_s(arguments),
            truncate=True if arguments.truncate else None,
            max_in_flight=arguments.max_concurrency if arguments.request_rate < math.inf else None,
        ),
        pretok=arguments.pretok,
        spell=arguments.prompt_form == "text",
    )


def _check_openai_supports(arguments: Namespace, workload: Workload) -> None:
    if arguments.truncate:
        raise ConfigError("--backend openai cannot ask a server to truncate: leave --truncate out")
    if any(request.priority or request.predecessor is not None for request in workload.requests):
        raise ConfigError(
            "--backend openai knows neither priorities nor the token ids of an answer, which the"
            " next turn of a chat needs: leave --turns out, or take another trace"
        )


def _spec(arguments: Namespace) -> TraceSpec:
    """Return the load to generate.

    An absolute schedule is an even request rate. Beside a rate, --max-concurrency is a bound and
    makes no closed loop.
    """
    values = vars(arguments)
    if arguments.request_rate < math.inf:
        values = values | {"max_concurrency": None}
    if arguments.submit_schedule == "absolute" and arguments.submit_interval_ms > 0:
        rate = 1000 / arguments.submit_interval_ms
        values = values | {"request_rate": rate, "burstiness": math.inf}
    return trace_spec(values)


def _workload(arguments: Namespace, spec: TraceSpec | None) -> Workload:
    text = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    texts: str | Sequence[str] | None = " ".join([text] * arguments.prompt_repeats)
    if spec is None or spec.input_len is not None:
        texts = None
    elif arguments.varied_prompts:
        texts = varied_texts(spec.num_requests, arguments.seed)
    return Workload(
        requests=read_requests(arguments.trace) if spec is None else list(generate(spec)),
        text=texts,
        unique=arguments.unique_prompts,
        repeat=arguments.same_prompts,
        seed=arguments.seed,
    )


def _conversations(arguments: Namespace, spec: TraceSpec, config: ServerConfig | None) -> Workload:
    """Return a workload of the file's prompts.

    Answers are as long as those of the file unless --max-new-tokens is given.

    Raises:
        ConfigError, ModelError: No tokenizer is available to count tokens.
    """
    given_tokenizer = getattr(arguments, "tokenizer", "")
    named = given_tokenizer or getattr(arguments, "model", "")
    if not named and config is None:
        raise ConfigError("--dataset-name sharegpt counts tokens: add --tokenizer MODEL")
    model = ModelArgs(model=named) if config is None else config.model
    tokenizer = tokenizer_of(given_tokenizer, model)
    samples = sample(
        read_sharegpt(arguments.dataset_path),
        arguments.num_requests,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        arguments.seed,
    )
    requests: list[TraceRequest] = list(generate(spec))
    if arguments.file_lengths:
        requests = [
            msgspec.structs.replace(request, max_new_tokens=chosen.answer_tokens)
            for request, chosen in zip(requests, samples, strict=True)
        ]
    return Workload(
        requests,
        text=[chosen.prompt for chosen in samples],
        unique=arguments.unique_prompts,
        repeat=arguments.same_prompts,
        seed=arguments.seed,
    )


def _gap_s(arguments: Namespace) -> float | None:
    """Return the gap between submits in seconds, or None if each request has its own time."""
    by_the_clock = (
        arguments.trace is not None
        or arguments.request_rate < math.inf
        or arguments.max_concurrency is not None
        or arguments.submit_schedule == "absolute"
    )
    return None if by_the_clock else float(arguments.submit_interval_ms / 1000)


def _as_json(value: Any) -> Any:
    """Return the value, or its text for a path or infinity, which JSON does not have."""
    plain = not isinstance(value, Path) and value != math.inf
    return value if plain else str(value)
