"""Command line flags as dataclass fields, and advice for flags that there are not.

FOREIGN_FLAGS says what a flag of vLLM, SGLang or llama.cpp is called here, REMOVED_FLAGS what to do
in place of a flag of an earlier version.
"""

import dataclasses
import types
import typing
from typing import Any, NamedTuple

import msgspec

from quadriga.errors import ConfigError

TYPE_METAVARS: dict[Any, str] = {int: "N", float: "FACTOR", str: "NAME"}


def flag(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    *,
    unit: str = "",
    basic: bool = False,
    alias: str = "",
    alias_value: str = "",
    secures: bool = False,
) -> Any:
    """Make a dataclass field that is also a command line flag.

    Args:
        default: value of a flag that is not given.
        text: help text, without the default.
        choices: values that the flag may have; empty: any.
        unit: unit or kind of the value, which --help shows in its place, such as SECONDS; "": by
            the flag's type.
        basic: shown by --help; the other flags are shown by --help-all only.
        alias: another name of the flag, as a field name.
        alias_value: value that the alias, which then takes none itself, gives the flag.
        secures: the flag protects the server, so that an empty value, such as that of an unset
            variable, is refused and not taken for the default.
    """
    metadata: dict[str, Any] = {"help": text, "choices": choices, "basic": basic, "unit": unit}
    metadata |= {"alias": alias, "alias_value": alias_value, "secures": secures}
    return dataclasses.field(default=default, metadata=metadata)


def flag_fields(*groups: Any) -> "list[dataclasses.Field[Any]]":
    """Return the fields of groups that are flags.

    The others have values that no server changes, but tests and experiments do.
    """
    fields = [field for group in groups for field in dataclasses.fields(group)]
    return [field for field in fields if "help" in field.metadata]


def flag_name(field_name: str) -> str:
    """Return the flag of a field."""
    return "--" + field_name.replace("_", "-")


def value_type(annotation: Any) -> Any:
    """Return the type of a flag's value; for `X | None`, X."""
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not types.NoneType)
    return annotation


def parser_of(annotation: Any) -> Any:
    """Return what makes a flag's value of its text: of `int | Literal[WORD]` a word or a number."""
    words = _words(annotation)
    if not words:
        return value_type(annotation)

    def number_or_word(text: str) -> int | str:
        return text if text in words else int(text)

    return number_or_word


def kind_name(annotation: Any) -> str:
    """Return the name of the type of a flag's value; `int` where it may be a word, too."""
    name: str = "int" if _words(annotation) else value_type(annotation).__name__
    return name


def _words(annotation: Any) -> tuple[str, ...]:
    """Return the words of `int | Literal[WORD, ...]`; none of another annotation."""
    parts = typing.get_args(annotation)
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return tuple(word for literal in literals for word in typing.get_args(literal))


def metavar(field: "dataclasses.Field[Any]") -> str:
    """Return the word for a flag's value in the help: its unit, or its type's word."""
    unit: str = field.metadata["unit"]
    return unit or TYPE_METAVARS.get(value_type(field.type), "")


def check_positive(flags: Any, *names: str) -> None:
    """Raise ConfigError unless each of these attributes of `flags` is positive or None."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive (it is {value})")


def checked_value(where: str, value: Any, field: "dataclasses.Field[Any]") -> Any:
    """Return a value that a program or a file gives a flag, as the command line would give it.

    Args:
        where: name of the value, for the error.
        value: the value.
        field: the flag.

    Raises:
        ConfigError: the value has not the flag's type, or is none of its choices.
    """
    value = converted(where, value, field.type)
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{where} is {value!r}: it must be one of {', '.join(choices)}")
    return value


def converted(where: str, value: Any, kind: Any) -> Any:
    """Return a value as one of a type. Raise ConfigError where it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").replace("null", "None").replace("Expected", "expected")
        raise ConfigError(f"{where} is {value!r}: {reason}") from None


# Far above every useful value, and far below what counters and the C library hold.
MAX_NUMBER = 2**48


def check_numbers(flags: Any) -> None:
    """Raise ConfigError for the first number of a group of flags that nothing can be sized by."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            raise ConfigError(
                f"{field.name} is {value}: it must be a number of at most {MAX_NUMBER}; leave"
                f" {flag_name(field.name)} out for the default"
            )


class ForeignFlag(NamedTuple):
    """A flag of another server.

    Attributes:
        servers: whose flag it is.
        here: the flag of this server, or a sentence's end that says why there is none.
    """

    servers: str
    here: str


VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"
ALWAYS_CHUNKED = "always on here; --chunked-prefill-size sets the size of a chunk"
SIDE_BY_SIDE = "not needed here: up to 4 prompts are computed side by side"
RELATIVE_LENGTH = "not needed here: shorter prompts pass longer ones"
ALWAYS_CACHED = "always on here; --disable-radix-cache switches it off"
ALL_LAYERS = "not needed here: --device has all layers"
METRICS_ARE_ON = "always on here, at /metrics"

FOREIGN_FLAGS = {
    "--max-model-len": ForeignFlag(VLLM, "--context-length"),
    "--max-num-seqs": ForeignFlag(VLLM, "--max-running-requests"),
    "--max-num-batched-tokens": ForeignFlag(VLLM, "--prefill-max-tokens"),
    "--max-num-queued-reqs": ForeignFlag(VLLM, "--max-queued-requests"),
    "--gpu-memory-utilization": ForeignFlag(VLLM, "--mem-fraction-static"),
    "--tensor-parallel-size": ForeignFlag(f"{VLLM} and {SGLANG}", "--tp"),
    "--disaggregation-mode": ForeignFlag(SGLANG, "--prefill-replicas"),
    "--kv-transfer-config": ForeignFlag(VLLM, "--prefill-replicas"),
    "-tp": ForeignFlag(VLLM, "--tp"),
    "--block-size": ForeignFlag(VLLM, "--page-size"),
    "--scheduling-policy": ForeignFlag(VLLM, "--schedule-policy"),
    "--generation-config": ForeignFlag(VLLM, "--sampling-defaults"),
    "--enforce-eager": ForeignFlag(VLLM, "--disable-cuda-graph"),
    "--max-cudagraph-capture-size": ForeignFlag(VLLM, "--max-batch-size"),
    "--cuda-graph-max-bs": ForeignFlag(SGLANG, "--max-batch-size"),
    "--no-enable-prefix-caching": ForeignFlag(VLLM, "--disable-radix-cache"),
    "--enable-prefix-caching": ForeignFlag(VLLM, ALWAYS_CACHED),
    "--enable-chunked-prefill": ForeignFlag(VLLM, ALWAYS_CHUNKED),
    "--max-num-partial-prefills": ForeignFlag(VLLM, SIDE_BY_SIDE),
    "--max-long-partial-prefills": ForeignFlag(VLLM, RELATIVE_LENGTH),
    "--long-prefill-token-threshold": ForeignFlag(VLLM, RELATIVE_LENGTH),
    "--enable-log-requests": ForeignFlag(VLLM, "--log-requests"),
    "--disable-log-stats": ForeignFlag(VLLM, "--log-stats-interval"),
    "--uvicorn-log-level": ForeignFlag(VLLM, "--log-level"),
    "--model-path": ForeignFlag(SGLANG, "--model"),
    "--tokenizer-path": ForeignFlag(SGLANG, "--tokenizer"),
    "--tokenizer-worker-num": ForeignFlag(SGLANG, "--tokenize-workers"),
    "--tp-size": ForeignFlag(SGLANG, "--tp"),
    "--dp-size": ForeignFlag(SGLANG, "--dp"),
    "-dp": ForeignFlag(VLLM, "--dp"),
    "--lora-paths": ForeignFlag(SGLANG, "--lora-modules"),
    "--max-loras-per-batch": ForeignFlag(SGLANG, "--max-loras"),
    "--max-loaded-loras": ForeignFlag(SGLANG, "--max-cpu-loras"),
    "--max-prefill-tokens": ForeignFlag(SGLANG, "--prefill-max-tokens"),
    "--enable-mixed-chunk": ForeignFlag(SGLANG, "--batch-mode"),
    "--enable-priority-scheduling": ForeignFlag(SGLANG, "--schedule-policy"),
    "--hicache-size": ForeignFlag(SGLANG, "--kv-offloading-size"),
    "--enable-hierarchical-cache": ForeignFlag(SGLANG, "--kv-offloading-size"),
    "--hicache-storage-backend": ForeignFlag(SGLANG, "--kv-cache-dir"),
    "--cache-ram": ForeignFlag(LLAMA_CPP, "--kv-offloading-size"),
    "--slot-save-path": ForeignFlag(LLAMA_CPP, "--kv-cache-dir"),
    "--enable-metrics": ForeignFlag(SGLANG, METRICS_ARE_ON),
    "--metrics": ForeignFlag(LLAMA_CPP, METRICS_ARE_ON),
    "--ctx-size": ForeignFlag(LLAMA_CPP, "--context-length"),
    "-c": ForeignFlag(LLAMA_CPP, "--context-length"),
    "-m": ForeignFlag(LLAMA_CPP, "--model"),
    "--hf-repo": ForeignFlag(LLAMA_CPP, "--model"),
    "--alias": ForeignFlag(LLAMA_CPP, "--served-model-name"),
    "-a": ForeignFlag(LLAMA_CPP, "--served-model-name"),
    "--n-gpu-layers": ForeignFlag(LLAMA_CPP, ALL_LAYERS),
    "--gpu-layers": ForeignFlag(LLAMA_CPP, ALL_LAYERS),
    "-ngl": ForeignFlag(LLAMA_CPP, ALL_LAYERS),
    "--parallel": ForeignFlag(LLAMA_CPP, "--max-running-requests"),
    "-np": ForeignFlag(LLAMA_CPP, "--max-running-requests"),
    "--threads": ForeignFlag(LLAMA_CPP, "--worker-threads"),
    "-t": ForeignFlag(LLAMA_CPP, "--worker-threads"),
    "--batch-size": ForeignFlag(LLAMA_CPP, "--prefill-max-tokens"),
    "-b": ForeignFlag(LLAMA_CPP, "--prefill-max-tokens"),
    "--ubatch-size": ForeignFlag(LLAMA_CPP, "--chunked-prefill-size"),
    "-ub": ForeignFlag(LLAMA_CPP, "--chunked-prefill-size"),
    "--cache-type-k": ForeignFlag(LLAMA_CPP, "--kv-cache-dtype"),
    "--cache-type-v": ForeignFlag(LLAMA_CPP, "--kv-cache-dtype"),
    "--cont-batching": ForeignFlag(
        LLAMA_CPP, "always on here; --batching static is for comparison"
    ),
    "--chat-template-file": ForeignFlag(LLAMA_CPP, "--chat-template"),
    "--ssl-key-file": ForeignFlag(LLAMA_CPP, "--ssl-keyfile"),
    "--ssl-cert-file": ForeignFlag(LLAMA_CPP, "--ssl-certfile"),
}


REMOVED_FLAGS = {
    "--plan-at-once": "each step is planned as late as the worker allows",
    "--pack-lookahead": "--schedule-policy pack looks at the 32 oldest requests",
    "--pack-fifo-every": "--schedule-policy pack fills every 8th step first come, first served",
    "--fair-tenants": "--keys and --tenants-by share between tenants",
    "--no-affinity": "taskset or the container limits the server to the cores that it may use",
    "--enable-nvtx": "python -m bench.gpu.profile shows kernels and gaps of a step",
    "--resumable-streams": "a request asks for it with resumable: true or the header X-Resumable:"
    " true, which a proxy can set",
    "--max-resumable-streams": "1,024 streams and 256 MiB of their events are kept",
    "--max-background-responses": "1,000 may be open; a client waits for one to end",
    "--max-open-batches": "100 may be open; a client waits for one to end",
    "--max-file-bytes": "a file has up to 200 MiB; split a larger one",
    "--max-stored-responses": "--max-stored-bytes bounds them, and --no-store keeps none",
    "--max-http-connections": "there may be one for each request of --max-running-requests and"
    " --max-queued-requests, and 4,096 in any case",
    "--ray-address": "the environment variable RAY_ADDRESS has the address of the cluster",
    "--scale-up-after": "replicas are added after 5 s above --target-ongoing-requests",
    "--no-status-line": "there is none with TERM=dumb, --log-format json, or without a terminal",
}
"""Flags of earlier versions, and what to do instead."""


def missing_flag_advice(flag: str) -> str | None:
    """Return what to do in place of a flag that there is not; None for an unknown one.

    Args:
        flag: flag of another server, or of an earlier version.
    """
    if flag in REMOVED_FLAGS:
        return f"{flag} is no flag any more: {REMOVED_FLAGS[flag]}"
    foreign = FOREIGN_FLAGS.get(flag)
    if foreign is None:
        return None
    here = f"{foreign.here} here" if foreign.here.startswith("--") else foreign.here
    return f"{foreign.servers}'s {flag} is {here}"
