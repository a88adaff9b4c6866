"""The command line of `bench.serving`: flags, refused combinations, and what they mean.

The meaning is an Options: the server, the load, the form of its prompts, and the output.
"""

import argparse
import json
import math
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench.client import load_generator, server
from bench.client.backends import DEFAULT_BASE_URL, OpenAIServer
from bench.load.datasets import read_sharegpt, sample
from bench.load.flags import (
    LOAD_FLAGS,
    LoadFlag,
    add_goodput,
    add_load_flags,
    add_trace,
    requests_of_trace,
    server_flags_in,
    trace_spec,
)
from bench.load.natural import natural_texts
from bench.load.synthetic import TraceSpec, generate
from bench.load.workload import (
    DEFAULT_PROMPT,
    PlannedRequest,
    Speller,
    Workload,
    pretokenize,
    spelled,
    tokenizer_of,
)
from quadriga.errors import ConfigError
from quadriga.sampling.params import MAX_SEED, SamplingParams
from quadriga.server.config import engine_args, server_config
from quadriga.server.config.flags import flag_name
from quadriga.server.config.parser import CommandParser
from quadriga.server.config.server_config import ServerConfig
from simulator import latency, trace

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Server flags that are allowed beside a running server.
CLIENT_SERVER_FLAGS = ("endpoint", "model", "tokenizer", "curve_dir")
OPENAI_SERVER_FLAGS = ("model", "tokenizer")
OPENAI_FLAGS = ("base_url", "openai_endpoint", "extra_body")
TEXT_FLAGS = ("prompt", "prompt_repeats", "unique_prompts", "pretok")
INTERVAL_FLAGS = ("submit_interval_ms", "submit_schedule")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
OUTPUT_FILES = ("json", "output_file", "plot", "save_trace", "server_log")

# The flag that each value of --dataset-name needs.
DATASETS = {
    "random": "random_input_len",
    "shared-prefix": "prefix_groups",
    "sharegpt": "dataset_path",
    "trace": "dataset_path",
}
NOT_IN_SHAREGPT = (
    "trace",
    "random_input_len",
    "prompt",
    "prompt_repeats",
    "prompt_form",
    "prefix_groups",
    "turns",
)
# Flags of the classic bench, which imply its report and its load: one text for all requests, at
# once. Flags that every bench has, such as --model and --num-requests, imply nothing.
CLASSIC_FLAGS = {
    *TEXT_FLAGS,
    *INTERVAL_FLAGS,
    *("no_stop_on_eos", "max_batch_size", "prefill_max_batch_size", "disable_radix_cache"),
    *("paged_attn", "cuda_graph", "tokenize_workers", "stream_interval"),
    *("warmup_runs", "repeat_runs"),
}
# Flags that the classic bench does not have: beside them the classic flags imply nothing.
OTHER_LOAD_FLAGS = {
    *("backend", "random_input_len", "trace", "dataset_name"),
    *("request_rate", "max_concurrency"),
}
PROMPT_FLAGS = {*TEXT_FLAGS, "random_input_len", "trace", "dataset_name"}
PACE_FLAGS = {*INTERVAL_FLAGS, "request_rate", "max_concurrency", "burstiness"}
DEFAULT_CONCURRENCY = 8

# Each flag, and the flags that would have no effect beside it.
EXCLUDES = {
    "trace": (*LOAD_FLAGS, *TEXT_FLAGS, *INTERVAL_FLAGS),
    "random_input_len": ("prompt", "prompt_repeats"),
    "prefix_groups": ("unique_prompts",),
    "request_rate": INTERVAL_FLAGS,
    "max_concurrency": INTERVAL_FLAGS,
    "output_file": ("save_result",),
}
# Each flag, and the flags of which it needs at least one.
NEEDS = {
    "dataset_path": ("dataset_name",),
    "details": ("json",),
    "output_details": ("output_file", "save_result"),
    "burstiness": ("request_rate",),
    "prefix_groups": ("random_input_len",),
    "prefix_len": ("prefix_groups",),
    "prefix_order": ("prefix_groups",),
    "turns": ("random_input_len",),
    "think_time": ("turns", "max_concurrency"),
    "save_trace": ("trace", "random_input_len", "pretok"),
    "prompt_form": ("trace", "random_input_len"),
}


def apply_dataset(arguments: Namespace, given: set[str]) -> None:
    """Translate --dataset-name into the other flags, in `arguments` and in `given`.

    `arguments.file_lengths` becomes true if answers are as long as those of the file.
    """
    name = arguments.dataset_name
    arguments.file_lengths = name == "sharegpt" and "max_new_tokens" not in given
    if name is None:
        return
    if DATASETS[name] not in given:
        needed = flag_name(DATASETS[name])
        raise ConfigError(f"--dataset-name {name} has no effect without {needed}: add it")
    if "dataset_path" in given and DATASETS[name] != "dataset_path":
        raise ConfigError(f"--dataset-path has no effect with --dataset-name {name}: leave it out")
    if name == "trace":
        arguments.trace = arguments.dataset_path
        given.add("trace")
    if name == "sharegpt" and (idle := [flag_name(n) for n in NOT_IN_SHAREGPT if n in given]):
        raise ConfigError(
            f"{', '.join(idle)} would have no effect: --dataset-name sharegpt sends what the file"
            " has"
        )


def apply_report(arguments: Namespace, given: Collection[str]) -> None:
    """Set the report, and the default load that goes with it.

    The classic report has the classic load. Otherwise `arguments.natural_prompts` is set unless
    prompts were asked for, and a load without any flags is a closed loop.
    """
    if arguments.report is None:
        is_classic = CLASSIC_FLAGS & set(given) and not OTHER_LOAD_FLAGS & set(given)
        arguments.report = "classic" if is_classic else "table"
    own_load = arguments.report == "table" and not PROMPT_FLAGS & set(given)
    arguments.natural_prompts = own_load
    if own_load and not PACE_FLAGS & set(given):
        arguments.max_concurrency = DEFAULT_CONCURRENCY
    arguments.short_warmup = "warmup_runs" not in given


def check(arguments: Namespace, given: Collection[str]) -> None:
    """Raise ConfigError for values and combinations that cannot work or have no effect."""
    _check_numbers(arguments)
    _check_together(arguments, given)
    _check_files(arguments)


def _check_numbers(arguments: Namespace) -> None:
    for name in ("prompt_repeats", "repeat_runs"):
        value = getattr(arguments, name)
        if not value > 0:
            raise ConfigError(f"{name} must be positive (it is {value})")
    for name in ("warmup_runs", "submit_interval_ms", "temperature"):
        value = getattr(arguments, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be 0 or more (it is {value})")
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise ConfigError(f"top_p must be above 0, and at most 1 (it is {arguments.top_p})")
    if not 0 <= arguments.seed <= MAX_SEED:
        raise ConfigError(f"seed must be from 0 to {MAX_SEED} (it is {arguments.seed})")


def _check_together(arguments: Namespace, given: Collection[str]) -> None:
    for name, others in EXCLUDES.items():
        idle = [flag_name(other) for other in others if other in given]
        if name in given and idle:
            raise ConfigError(
                f"{', '.join(idle)} would have no effect beside {flag_name(name)}: leave"
                f" {' and '.join(idle)} out, or {flag_name(name)}"
            )
    for name, others in NEEDS.items():
        if name in given and not set(others) & set(given):
            choice = " or ".join(flag_name(other) for other in others)
            raise ConfigError(f"{flag_name(name)} has no effect without {choice}: add it")
    if arguments.backend == "openai":
        _refuse_server_flags(arguments, arguments.base_url or DEFAULT_BASE_URL, OPENAI_SERVER_FLAGS)
    elif idle := [flag_name(name) for name in OPENAI_FLAGS if name in given]:
        raise ConfigError(f"{', '.join(idle)} has no effect without --backend openai: add it")
    elif "endpoint" in arguments:
        _refuse_server_flags(arguments, arguments.endpoint, CLIENT_SERVER_FLAGS)


def _refuse_server_flags(arguments: Namespace, where: str, allowed: Collection[str]) -> None:
    idle = [flag_name(n) for n in server_flags_in(arguments) if n not in allowed]
    idle += [flag_name(n) for n in ("config", "server_log") if getattr(arguments, n, None)]
    if idle:
        raise ConfigError(
            f"{', '.join(idle)} would have no effect on the server that runs at {where}: leave"
            " them out, or measure a server of the bench's own"
        )


def _check_files(arguments: Namespace) -> None:
    """Check that every output file can be written, before anything is run."""
    for name in OUTPUT_FILES:
        path = getattr(arguments, name)
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag_name(name)} {path}: there is no directory {path.parent}")
    if arguments.plot is not None and arguments.plot.suffix not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {arguments.plot}: it must end in {', '.join(PLOT_SUFFIXES)}")


PROG = "python -m bench.serving"
DESCRIPTION = """Measure a server as a streaming client sees it. Without --endpoint the bench starts
a server of its own, which takes the server's flags; with it, a running one is measured."""

# The flags that no other bench has, by their names.
OWN_FLAGS = {
    "backend": LoadFlag(
        str, "zmq", None,
        "our own protocol, or an OpenAI-compatible server; --model then names its model",
        ("zmq", "openai"),
    ),
    "base_url": LoadFlag(
        str, None, "URL",
        f"URL of the OpenAI-compatible server (default: {DEFAULT_BASE_URL}); the environment"
        " variable OPENAI_API_KEY holds its key",
    ),
    "openai_endpoint": LoadFlag(
        str, "completions", None, "of the OpenAI-compatible server", ("completions", "chat")
    ),
    "extra_body": LoadFlag(
        str, "{}", "JSON", "fields to add to the body of every request; null removes a field"
    ),
    "dataset_name": LoadFlag(
        str, None, None,
        "random (--random-input-len), shared-prefix (--prefix-groups), sharegpt or trace"
        " (--dataset-path); without it, natural prompts",
        tuple(DATASETS), "--dataset",
    ),
    "dataset_path": LoadFlag(
        Path, None, "FILE",
        "sharegpt: a JSON list of objects with `conversations`, whose first two turns give"
        " the prompt and the length of the answer; trace: as for --trace",
    ),
    "prompt": LoadFlag(
        str, None, None,
        "text of every request (default: different natural prompts, as chats if the model has a"
        f" chat template; with --report classic {DEFAULT_PROMPT!r})",
    ),
    "prompt_repeats": LoadFlag(int, 1, "N", "repeat the text N times"),
    "unique_prompts": LoadFlag(
        bool, False, None, "give every request a prompt of its own, so that no prefix cache helps"
    ),
    "prompt_form": LoadFlag(
        str, "ids", None,
        "send random prompts as token ids, or as words of exactly as many tokens",
        ("ids", "text"),
    ),
    "same_prompts": LoadFlag(
        bool, False, None,
        "send the same prompts in every run, which the prefix cache may then serve",
    ),
    "pretok": LoadFlag(bool, False, None, "send token ids, so that the server tokenizes nothing"),
    "truncate": LoadFlag(bool, False, None, "keep the last tokens of a prompt that is too long"),
    "no_stop_on_eos": LoadFlag(
        bool, False, None, "generate all --max-new-tokens of every request"
    ),
    "temperature": LoadFlag(float, 0.0, None, "of sampling; 0 is greedy"),
    "top_p": LoadFlag(float, None, None, "of sampling (default: the server's)"),
    "seed": LoadFlag(int, 0, None, "seed of sampling and of random prompts"),
    "submit_interval_ms": LoadFlag(float, 0.0, "MS", "time between two requests"),
    "submit_schedule": LoadFlag(
        str, "relative", None,
        "count the interval from the submit before, or from the start of the run",
        ("relative", "absolute"),
    ),
    "warmup_runs": LoadFlag(
        int, 1, "N", "unmeasured whole runs with other prompts (default: a few requests)"
    ),
    "repeat_runs": LoadFlag(int, 1, "N", "measured runs"),
    "report": LoadFlag(
        str, None, None,
        "table: one table and a verdict; classic: one line per figure (default: table, and"
        " classic beside flags of the classic bench such as --prompt or --prefill-max-batch-size)",
        ("table", "classic"),
    ),
    "verbose": LoadFlag(bool, False, None, "print all figures"),
    "json": LoadFlag(Path, None, "FILE", "write all figures to this file"),
    "details": LoadFlag(bool, False, None, "add the record of every request to --json"),
    "output_file": LoadFlag(
        Path, None, "FILE.jsonl",
        "append each run as a line of JSON with the keys that the bench clients of SGLang and"
        " vLLM write",
    ),
    "save_result": LoadFlag(
        bool, False, None, "the same, into a file named after backend, rate, model and time"
    ),
    "output_details": LoadFlag(
        bool, False, None, "add lengths, times and errors of every request to --output-file",
        alias="--save-detailed",
    ),
    "plot": LoadFlag(Path, None, "FILE.png", "draw the first measured run"),
    "save_trace": LoadFlag(
        Path, None, "FILE",
        "write the first measured run's requests; --trace and the same --seed repeat them",
    ),
    "server_log": LoadFlag(
        Path, None, "FILE",
        "log file of the server that the bench starts (default: standard error)",
    ),
    # The server has no flags of these names.
    "paged_attn": LoadFlag(bool, False, None, "ask for paged attention (it is always on)"),
    "cuda_graph": LoadFlag(bool, False, None, "ask for CUDA graphs in decode"),
}  # fmt: skip
SWITCHES = ("paged_attn", "cuda_graph")
GROUPS = {
    "server to measure": ("backend", "base_url", "openai_endpoint", "extra_body"),
    "requests": (
        *("dataset_name", "dataset_path", "prompt", "prompt_repeats", "unique_prompts"),
        *("random_input_len", "prompt_form", "same_prompts", "pretok", "truncate"),
        *("num_requests", "max_new_tokens", "no_stop_on_eos", "temperature", "top_p", "seed"),
    ),
    "sharing among requests": (
        *("prefix_groups", "prefix_len", "prefix_order"),
        *("turns", "think_time", "num_clients"),
    ),
    "schedule": (
        *("submit_interval_ms", "submit_schedule", "request_rate", "burstiness"),
        *("max_concurrency", "warmup_runs", "repeat_runs"),
    ),
    "output": (
        *("report", "verbose", "json", "details", "output_file", "save_result"),
        *("output_details", "plot", "save_trace", "server_log"),
    ),
    "features to ask for; the output shows the server's own": SWITCHES,
}
FLAGS = LOAD_FLAGS | OWN_FLAGS
DEFAULTS = {name: flag.default for name, flag in FLAGS.items()}


def read_flags(argv: list[str], prog: str) -> Namespace:
    """Return every flag's value; absent server flags stay out, or raise ConfigError.

    `prog` is the command's name in --help.
    """
    arguments, given = _arguments(argv, prog)
    apply_dataset(arguments, given)
    check(arguments, given)
    apply_report(arguments, given)
    return arguments


def result_file(arguments: Namespace) -> Path | None:
    """Return the file of --output-file or --save-result, or None."""
    if arguments.save_result:
        model = getattr(arguments, "model", "").rstrip("/").rsplit("/", 1)[-1] or "model"
        rate = f"{arguments.request_rate:g}qps" if arguments.request_rate < math.inf else "infqps"
        return Path(f"{arguments.backend}-{rate}-{model}-{datetime.now():%Y%m%d-%H%M%S}.json")
    path: Path | None = arguments.output_file
    return path


# --- the parser -----------------------------------------------------------------------------------


def _arguments(argv: list[str], prog: str) -> tuple[Namespace, set[str]]:
    """Return every flag's value, and the names of the flags that were given."""
    parser, unset = _parser(prog), object()
    defaults = DEFAULTS | vars(parser.parse_args([]))
    parsed = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(defaults, unset))))
    given = {name: value for name, value in parsed.items() if value is not unset}
    return Namespace(**{**defaults, **given}), set(given)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog, usage="%(prog)s [FLAGS]", description=DESCRIPTION, allow_abbrev=False
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for title, group in groups.items():
        add_load_flags(group, GROUPS[title], DEFAULTS, FLAGS)
    add_trace(groups["schedule"])
    add_goodput(groups["output"])
    server_config.add_flags(parser)
    return parser


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The server to measure: one that the bench starts, a running one, or an OpenAI-compatible one.

    Attributes:
        config: flags of the server that the bench starts; None: a running one is measured.
        launcher: the launcher.py that starts it, perhaps of another checkout.
        endpoint: endpoint of a running Quadriga server, or "".
        openai: the OpenAI-compatible server, or None.
        curve_dir: directory of the keys that the bench connects with, or "".
        model: model as given on the command line, or "".
        tokenizer: tokenizer as given on the command line, or "": the model's.
    """

    config: ServerConfig | None
    endpoint: str
    openai: OpenAIServer | None
    curve_dir: str
    model: str
    tokenizer: str
    server_log: Path | None
    launcher: Path = server.LAUNCHER


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The requests of every run.

    Attributes:
        spec: what the requests were generated from; None: they come from a trace file.
        pretok: texts are sent as token ids.
        spell: random token ids are sent as a text of as many tokens.
    """

    workload: Workload
    spec: TraceSpec | None
    send: load_generator.SendOptions
    pretok: bool
    spell: bool


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The figures and files of a bench; a path of None writes no file.

    Attributes:
        report: "table" or "classic".
        verbose: print all figures.
    """

    slo: latency.Slo
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
        short_warmup: a warm-up sends only a few requests, not a whole run.
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
            slo=latency.Slo.parse(arguments.goodput),
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
        send=load_generator.SendOptions(
            params,
            gap_s=_gap_s(arguments),
            truncate=True if arguments.truncate else None,
            max_in_flight=arguments.max_concurrency if arguments.request_rate < math.inf else None,
            as_chats=arguments.natural_prompts and target.openai is None,
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
    elif arguments.natural_prompts:
        texts = natural_texts(spec.num_requests, arguments.seed)
    return Workload(
        requests=requests_of_trace(arguments) if spec is None else list(generate(spec)),
        text=texts,
        unique=arguments.unique_prompts,
        repeat=arguments.same_prompts,
        seed=arguments.seed,
    )


def _conversations(arguments: Namespace, spec: TraceSpec, config: ServerConfig | None) -> Workload:
    """Return a workload of the file's prompts.

    Answers are as long as those of the file unless --max-new-tokens is given.

    Raises:
        ConfigError, ModelError: no tokenizer is available to count tokens.
    """
    given_tokenizer = getattr(arguments, "tokenizer", "")
    named = given_tokenizer or getattr(arguments, "model", "")
    if not named and config is None:
        raise ConfigError("--dataset-name sharegpt counts tokens: add --tokenizer MODEL")
    model = engine_args.ModelArgs(model=named) if config is None else config.model
    tokenizer = tokenizer_of(given_tokenizer, model)
    samples = sample(
        read_sharegpt(arguments.dataset_path),
        arguments.num_requests,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        arguments.seed,
    )
    requests: list[trace.TraceRequest] = list(generate(spec))
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


@dataclass(frozen=True, slots=True)
class Preparation:
    """How jobs get their final form; vocab_size is None if no tokenizer was needed."""

    prepare: Callable[[Sequence[PlannedRequest]], Sequence[PlannedRequest]]
    vocab_size: int | None = None


def preparation(options: Options, served: str = "") -> Preparation:
    """Return the preparation that the options ask for, with the running server's model `served`.

    Raises ModelError or ConfigError if a tokenizer is needed and not available.
    """
    if not (options.load.pretok or options.load.spell or options.target.tokenizer):
        return Preparation(lambda jobs: jobs)
    tokenizer = tokenizer_of(options.target.tokenizer, _model_of(options, served))
    size = tokenizer.get_vocab_size()
    if options.load.pretok:
        return Preparation(lambda jobs: pretokenize(jobs, _encoder(tokenizer)), size)
    if options.load.spell:
        speller = Speller(tokenizer)
        return Preparation(lambda jobs: spelled(jobs, speller), size)
    return Preparation(lambda jobs: jobs, size)


def _model_of(options: Options, served: str) -> engine_args.ModelArgs:
    if options.target.config is not None:
        return options.target.config.model
    return engine_args.ModelArgs(model=options.target.model or served)


def _encoder(tokenizer: "Tokenizer") -> Callable[[str], list[int]]:
    """Return a function from text to token ids, as the frontend computes them."""
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
