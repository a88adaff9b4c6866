"""The flags of a server as keywords of LLM."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from quadriga.config.flags import flag_name, value_type
from quadriga.config.foreign_flags import foreign_flag_advice
from quadriga.config.frontend_args import PRIVATE_ENDPOINT
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError
from quadriga.keywords import check_keywords


class ServerFlags(TypedDict, total=False):
    """Flags of the server, without those of the endpoint and the web gateway.

    docs/configuration.md describes them: `max_batch_size=8` is `--max-batch-size 8`. A test
    compares this list with the server's flags.
    """

    # Model
    revision: str
    tokenizer: str
    chat_template: str
    load_format: Literal["auto", "dummy"]
    model_impl: Literal["auto", "native", "transformers"]
    trust_remote_code: bool
    context_length: int | None
    # Frontend, text to token ids (tokenizer_proc)
    tokenize_workers: int
    default_max_tokens: int
    allow_auto_truncate: bool
    sampling_defaults: Literal["model", "openai"]
    tool_call_parser: str
    reasoning_parser: str
    queue_timeout: float | None
    request_timeout: float | None
    # Scheduling (scheduler_proc)
    max_batch_size: int
    prefill_max_batch_size: int | None
    prefill_max_tokens: int
    chunked_prefill_size: int | None
    max_num_partial_prefills: int
    itl_target: float | None
    max_running_requests: int
    max_queued_requests: int
    max_requests_per_client: int | None
    batch_mode: Literal["prefill-first", "mixed", "decode-first", "alternate"]
    batching: Literal["continuous", "static"]
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "pack", "priority", "shortest"]
    pack_lookahead: int | None
    pack_fifo_every: int | None
    priority_preemption_threshold: int | None
    fair_clients: bool
    fair_tenants: bool
    batch_concurrency_beside: int
    schedule_conservativeness: float
    disable_radix_cache: bool
    plan_at_once: bool
    speculative_method: Literal["none", "ngram", "auto", "self"]
    num_speculative_tokens: int
    journal: str
    no_journal: bool
    resume: bool
    # Computation (worker_proc)
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    page_size: int
    max_total_tokens: int | None
    mem_fraction_static: float | None
    attention_backend: Literal["auto", "native", "triton", "flashinfer", "torch"]
    cuda_graph_max_bs: int | None
    disable_cuda_graph: bool
    enable_nvtx: bool
    enable_deterministic_inference: bool
    quantization: Literal["auto", "none", "int8", "int4", "gguf"]
    kv_cache_dtype: Literal["auto", "int8", "fp8"]
    kv_cache_dir: str
    kv_cache_dir_size: float
    kv_offloading_size: float
    tp: int
    worker_threads: int | None
    no_affinity: bool
    # Detokenization, token ids to text (detok_proc)
    stream_interval: int
    # Tenants (tokenizer_proc, scheduler_proc, http_proc)
    keys: str
    tenants_by: Literal["none", "address"]
    usage_log: str
    # Replicas (launcher.py, tokenizer_proc)
    dp: int
    load_balance_method: Literal["cache-aware", "least-loaded", "round-robin"]
    cluster: Literal["none", "ray"]
    ray_address: str
    replica_cpus: float
    nnodes: int | None
    min_replicas: int | None
    max_replicas: int | None
    target_ongoing_requests: int
    scale_up_after: float
    scale_down_after: float
    # Traces (tokenizer_proc, http_proc)
    otlp_endpoint: str
    trace_sampling_ratio: float | None
    keep_traces: Literal["sampled", "all"]
    # Start, stop and logging (launcher.py)
    start_timeout: float
    shutdown_timeout: float
    max_restarts: int
    watchdog_timeout: float
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json"]
    log_requests: bool
    log_slow_requests: float | None
    log_stats_interval: float


# Values that differ from the command line's: the program is the only client.
OWNED_SERVER = {
    "endpoint": PRIVATE_ENDPOINT,
    "no_http": True,
    "no_status_line": True,
    "log_level": "warning",
}


def server_argv(model: str | Path, flags: Mapping[str, Any]) -> list[str]:
    """Return the command line flags of a server that only this program uses.

    Raises:
        TypeError: there is no such flag; the message names similar ones.
        ConfigError: a value cannot work.
    """
    for name in flags.keys() - ServerFlags.__annotations__.keys():
        if advice := foreign_flag_advice(flag_name(name)):
            raise TypeError(f"LLM() has no keyword {name!r}: {advice}")
    check_keywords("LLM", flags, ServerFlags.__annotations__)
    fields = {f.name: f for group in ServerConfig().groups() for f in dataclasses.fields(group)}
    values = {name: _checked(fields[name], value) for name, value in flags.items()}
    config = ServerConfig().replace(**OWNED_SERVER | values, model=str(model))
    config.validate()
    return config.to_argv()


def _checked(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Return the value of a flag if it has the flag's type; a path stands for its text."""
    if isinstance(value, Path) and value_type(field.type) is str:
        value = str(value)
    try:
        value = msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").replace("null", "None").replace("Expected", "expected")
        raise ConfigError(f"{field.name} is {value!r}: {reason}") from None
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{field.name} is {value!r}: it must be one of {', '.join(choices)}")
    return value
