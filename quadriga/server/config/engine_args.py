"""Flags of what computes: the model, the scheduler, the worker and the replicas.

Each class is one group of docs/configuration.md, and validates its own flags. ReplicaPlace says
which replica a process belongs to.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.server.config.flags import check_positive, flag
from quadriga.server.config.kv_events import KVEventsConfig, parse_kv_events

BUILTIN_MODEL = "smollm2-135m"


class AdapterModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter of --lora-modules, with the fields of vLLM's.

    Attributes:
        base_model_name: of no effect: the model of the flag is the adapter's.
        pinned: it is loaded at the start, and keeps its place in the worker.
    """

    name: str
    path: str
    base_model_name: str = ""
    pinned: bool = False


def _adapter_modules(text: str) -> Iterator[AdapterModule]:
    """Yield the items of --lora-modules.

    Raises:
        ValueError: an object is not one of an adapter.
    """
    if text.startswith("["):
        yield from msgspec.json.decode(text, type=list[AdapterModule])
        return
    while text := text.lstrip(" ,"):
        if text.startswith("{"):
            _, end = json.JSONDecoder().raw_decode(text)
            yield msgspec.json.decode(text[:end], type=AdapterModule)
            text = text[end:]
        else:
            item, _, text = text.partition(",")
            name, _, path = item.partition("=")
            yield AdapterModule(name, path)


def parse_adapter_modules(text: str) -> tuple[AdapterModule, ...]:
    """Return the adapters of --lora-modules: NAME=PATH or JSON objects, separated by commas.

    Raises:
        ConfigError: an item is neither, or two have one name.
    """
    try:
        modules = list(_adapter_modules(text.strip()))
    except ValueError as error:  # also msgspec's and json's
        raise ConfigError(
            f"lora_modules is {text[:200]!r}: {error}; each adapter is NAME=PATH, or an object"
            ' such as {"name": "french", "path": "/adapters/french", "pinned": true}'
        ) from None
    seen: set[str] = set()
    for module in modules:
        if not (module.name and module.path):
            raise ConfigError(
                f"lora_modules has {module.name or module.path!r}: it must be NAME=PATH, such as"
                " french=/adapters/french"
            )
        if module.name in seen:
            raise ConfigError(f"lora_modules has {module.name!r} twice: give one another name")
        seen.add(module.name)
    return tuple(modules)


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Model."""

    model: str = flag(
        BUILTIN_MODEL,
        "Hub id, directory, .gguf file, gpt2 and its sizes, or a built-in name; one server serves"
        " several if it is given several times",
        unit="MODEL",
        basic=True,
    )
    served_model_name: str = flag(
        "", "name that clients see (default: --model, or of a path the name of its file or folder)"
    )
    revision: str = flag("", "branch, tag or commit of a Hub id (default: main)", unit="REVISION")
    tokenizer: str = flag(
        "",
        "Hub id, directory, .gguf file or built-in name whose tokenizer replaces the model's own"
        " (default: --model)",
        unit="MODEL",
    )
    chat_template: str = flag(
        "", "Jinja file that replaces the model's own chat template", unit="PATH"
    )
    load_format: str = flag(
        "auto", "dummy: random weights for a known architecture", ("auto", "dummy")
    )
    model_impl: str = flag(
        "auto",
        "native: the worker's own model files and kernels; transformers: any causal language model"
        " of the package transformers that has its attention interface (auto: native where there"
        " is a file for the model, else transformers)",
        ("auto", "native", "transformers"),
    )
    trust_remote_code: bool = flag(
        False,
        "let the worker run Python code of the model's repository (--model-impl transformers)",
    )
    context_length: int | None = flag(
        None, "tokens of context, if shorter than the model's own", unit="TOKENS", basic=True
    )
    enable_lora: bool = flag(
        False, "let clients load LoRA adapters from paths of this machine: see docs/adapters.md"
    )
    lora_modules: str = flag(
        "",
        "LoRA adapters that are served by name, separated by commas, or as JSON such as"
        ' {"name": "french", "path": "/adapters/french", "pinned": true}',
        unit="NAME=PATH",
    )
    lora_dir: str = flag(
        "", "directory of LoRA adapters: a folder's name is a model that requests load", unit="DIR"
    )
    max_lora_rank: int = flag(256, "largest rank of an adapter")
    models: str = flag(
        "",
        "YAML file of models and their flags: see docs/several-models.md",
        unit="FILE.yaml",
    )
    models_dir: str = flag("", "directory of models that requests load", unit="DIR")

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "context_length", "max_lora_rank")
        _ = self.adapter_modules

    @property
    def adapter_modules(self) -> tuple[AdapterModule, ...]:
        """The adapters of --lora-modules.

        Raises:
            ConfigError: an item is no NAME=PATH and no JSON, or two have one name.
        """
        return parse_adapter_modules(self.lora_modules)

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return bool(self.enable_lora or self.lora_modules or self.lora_dir)

    @property
    def shown_name(self) -> str:
        """Name that clients see."""
        return self.served_model_name or _name_of(self.model)

    @property
    def source(self) -> str:
        """The path of a model that is called by its file or folder, else the name."""
        is_path = self.model != self.shown_name == _file_name(self.model)
        return _absolute(self.model) if is_path else self.shown_name

    def is_called(self, name: str) -> bool:
        """Return whether clients may call the model so: by its name, or by its path."""
        return name == self.shown_name or (name != "" and _absolute(name) == self.source)


def _name_of(model: str) -> str:
    """Return the name of a file or folder that is there, else the value of --model itself."""
    return _file_name(model) if os.path.exists(_absolute(model)) else model


def _file_name(model: str) -> str:
    return os.path.basename(_absolute(model)) or model


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


BATCH_MODES = ("prefill-first", "mixed", "decode-first", "alternate")
# Tokens of a single prompt that a step may compute even if fewer keep the worker busy.
MIN_SINGLE_CHUNK_TOKENS = 256
MAX_SPECULATIVE_TOKENS = 63
POLICIES = ("fcfs", "lpm", "dfs-weight", "pack", "priority", "shortest")


@dataclass(frozen=True, slots=True)
class SchedulerArgs:
    """Scheduling (scheduler_proc)."""

    max_batch_size: int = flag(64, "requests in one decode step", basic=True)
    prefill_max_batch_size: int | None = flag(
        None, "waiting requests that one step may admit (default: --max-batch-size)"
    )
    prefill_max_tokens: int = flag(
        16384, "prompt tokens that one prefill step may hold", unit="TOKENS"
    )
    chunked_prefill_size: int | None = flag(
        None,
        "prompt tokens of one step; a longer prompt is computed in chunks of this size. -1: prompts"
        " are never cut (default: 8192 on a GPU; measured at the start on a CPU)",
        unit="TOKENS",
    )
    itl_target: float | None = flag(
        None,
        "time that a step beside running streams may take, in ms: a step holds as many prompt"
        " tokens as fit into it, by what earlier steps took (default: no bound)",
        unit="MS",
    )
    max_running_requests: int = flag(256, "requests that hold a slot at the same time")
    max_queued_requests: int = flag(4096, "waiting requests; further ones are refused at once")
    max_requests_per_client: int | None = flag(
        None, "open requests of one client; further ones are refused at once (default: no limit)"
    )
    batch_mode: str = flag(
        "mixed",
        "what a step computes. mixed: prompts and running requests together; prefill-first: prompts"
        " as long as any fit; decode-first: prompts only to fill up the batch; alternate: both in"
        " turns",
        BATCH_MODES,
        alias="decode_first",
        alias_value="decode-first",
    )
    batching: str = flag(
        "continuous",
        "static: run a batch to its end before the next is admitted (for comparison)",
        ("continuous", "static"),
    )
    schedule_policy: str = flag(
        "fcfs",
        "which waiting request is admitted next. fcfs: the oldest; lpm: the one with the longest"
        " cached prefix; dfs-weight: branch by branch of the prefix tree; pack: the prompts that"
        " fill a step best; shortest: the one with the fewest tokens left; priority: the one with"
        " the largest priority",
        POLICIES,
    )
    priority_preemption_threshold: int | None = flag(
        None,
        "priority: difference in priority from which a waiting request preempts a running one"
        " (default: 10)",
    )
    fair_clients: bool = flag(
        False, "serve clients in turns by the tokens computed for them, however much each has sent"
    )
    batch_concurrency_beside: int = flag(
        0,
        "lines of batches, and other requests of the priority -1000, that run at one time beside"
        " others; the rest of them pause",
    )
    schedule_conservativeness: float = flag(1.0, "larger: admit less and retract less, in (0, 10]")
    kv_events_config: str = flag(
        "",
        "publish over ZeroMQ which prompts are in the prefix cache, with vLLM's fields; the events"
        " have their tokens: see docs/kubernetes.md",
        unit="JSON",
    )
    disable_radix_cache: bool = flag(
        False, "do not reuse the KV cache of common prompt prefixes", alias="no_prefix_cache"
    )
    cache_pin_fraction: float = flag(
        0.5,
        "largest share of the KV pool that stays cached because requests ask for it (cache_control,"
        " prompt_cache_key), from 0 to 1; 0: none",
    )
    speculative_method: str = flag(
        "auto",
        "guess tokens from the request's own text and from recent answers, and verify them: same"
        " answers, in fewer steps. auto: with few requests at a time, while it makes answers faster"
        " (native kernels of a CPU only); ngram: wherever text repeats; self: a copy of the model"
        " in 4 bits guesses, while that makes answers faster (CPU only)",
        ("none", "ngram", "auto", "self"),
    )
    num_speculative_tokens: int = flag(
        15, "largest number of draft tokens of a request in one step", unit="TOKENS"
    )
    max_loras: int = flag(
        16, "LoRA adapters that one step may compute; requests of others wait for a place"
    )
    max_cpu_loras: int | None = flag(
        None,
        "LoRA adapters that stay read in the worker's host memory, those of --max-loras among them;"
        " another one is read from its files again (default: --max-loras)",
    )
    journal: str = flag(
        "",
        "directory of the journal, from which a restarted scheduler recovers all requests; a"
        " directory that is given is synced and survives the server (default: the run directory)",
        unit="DIR",
        basic=True,
    )
    no_journal: bool = flag(False, "keep no journal: requests are lost if the scheduler dies")
    resume: bool = flag(False, "continue the requests that an earlier run left in --journal")
    # No flags. --keys and --tenants-by set fair_tenants; tests and experiments set the others.
    fair_tenants: bool = False
    max_num_partial_prefills: int = 4
    pack_lookahead: int = 32
    pack_fifo_every: int = 8
    plan_at_once: bool = False

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "max_batch_size", "prefill_max_batch_size", "prefill_max_tokens")
        check_positive(self, "max_running_requests", "max_queued_requests", "max_loras")
        check_positive(self, "max_requests_per_client", "priority_preemption_threshold")
        if self.itl_target is not None and not self.itl_target > 0:
            raise ConfigError(
                f"itl_target is {self.itl_target}: it must be milliseconds above 0; leave it out"
                " for no bound"
            )
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}: it must be 1 to"
                f" {MAX_SPECULATIVE_TOKENS}; --speculative-method none drafts none"
            )
        if self.batch_concurrency_beside < 0:
            raise ConfigError(
                f"batch_concurrency_beside is {self.batch_concurrency_beside}: it must be 0 or more"
            )
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk != -1 and chunk <= 0:
            raise ConfigError(
                f"chunked_prefill_size must be positive, or -1 for whole prompts (it is {chunk})"
            )
        if not 0 < self.schedule_conservativeness <= 10:
            raise ConfigError(
                f"schedule_conservativeness is {self.schedule_conservativeness}:"
                " it must be above 0 and at most 10"
            )
        if not 0 <= self.cache_pin_fraction <= 1:
            raise ConfigError(
                f"cache_pin_fraction is {self.cache_pin_fraction}: it must be a share of the KV"
                " pool from 0 to 1; 0 keeps nothing longer than other cached prefixes"
            )
        self._check_together()
        if self.kv_events.is_on and self.disable_radix_cache:
            raise ConfigError(
                "--kv-events-config publishes what the prefix cache has: leave"
                " --disable-radix-cache out"
            )

    @property
    def kv_events(self) -> KVEventsConfig:
        """What --kv-events-config says.

        Raises:
            ConfigError: it is not valid.
        """
        return parse_kv_events(self.kv_events_config)

    def _check_together(self) -> None:
        """Raise ConfigError for flags that contradict each other or have no effect."""
        mode = self.batch_mode
        if self.batching == "static" and mode not in (SchedulerArgs().batch_mode, "prefill-first"):
            raise ConfigError(
                "--batching static prefills a batch and then decodes it: it contradicts"
                f" --batch-mode {mode}"
            )
        if self.resume and not self.journal:
            raise ConfigError("--resume goes on with a journal: say which with --journal DIR")
        if self.no_journal and self.journal:
            raise ConfigError("--no-journal contradicts --journal: leave one out")
        if self.num_loras_in_memory < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras {self.max_cpu_loras} is fewer than the {self.max_loras} adapters"
                f" of a step (--max-loras): set it to {self.max_loras} or more, or lower"
                " --max-loras"
            )
        if self.disable_radix_cache and self.schedule_policy in ("lpm", "dfs-weight"):
            raise ConfigError(
                f"--schedule-policy {self.schedule_policy} orders by cached prefixes:"
                " it needs the prefix cache, leave --disable-radix-cache out"
            )
        if self.fair_tenants and self.fair_clients:
            raise ConfigError(
                "--fair-clients shares between clients, --keys and --tenants-by between tenants:"
                " leave --fair-clients out"
            )
        if self.priority_preemption_threshold is not None and self.schedule_policy != "priority":
            raise ConfigError(
                "--priority-preemption-threshold has no effect with --schedule-policy"
                f" {self.schedule_policy}: add --schedule-policy priority, or leave it out"
            )

    @property
    def num_loras_in_memory(self) -> int:
        """Number of adapters that stay read, those of a step among them."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    @property
    def prefill_width(self) -> int:
        """Number of waiting requests that one step may admit."""
        return self.prefill_max_batch_size or self.max_batch_size

    @property
    def is_fair(self) -> bool:
        """Whether clients or tenants have turns."""
        return self.fair_clients or self.fair_tenants

    @property
    def mode(self) -> str:
        """--batch-mode, or prefill-first for static batching."""
        return "prefill-first" if self.batching == "static" else self.batch_mode

    @property
    def measures_chunks(self) -> bool:
        """Whether the worker measures the number of prompt tokens that a step should hold."""
        return self.chunked_prefill_size is None

    def prefill_budget(self, measured: int) -> int:
        """Return the number of prompt tokens that one step may hold.

        Args:
            measured: smallest number of tokens that keeps the worker busy.
        """
        chunk = self.chunk_size(measured)
        return self.prefill_max_tokens if chunk is None else min(chunk, self.prefill_max_tokens)

    def prefill_slack(self, measured: int) -> int:
        """Return the number of prompt tokens that the last prefill step may hold beyond the budget.

        It is half a step, since a smaller step of its own would not keep the worker busy.
        """
        if not self.measures_chunks:
            return 0
        budget = self.prefill_budget(measured)
        return min(budget // 2, self.prefill_max_tokens - budget)

    def longest_chunk(self, measured: int) -> int:
        """Return the number of tokens that a step may compute of a single prompt.

        It may exceed the budget: with several prompts the first ones would wait for the last, but
        a single one delays only itself.
        """
        budget = self.prefill_budget(measured)
        if not self.measures_chunks:
            return budget
        return min(max(budget, MIN_SINGLE_CHUNK_TOKENS), self.prefill_max_tokens)

    def chunk_size(self, measured: int) -> int | None:
        """Return the number of tokens of the largest chunk; None if prompts are never cut."""
        if self.chunked_prefill_size is None:
            return measured
        return None if self.chunked_prefill_size == -1 else self.chunked_prefill_size


GPU_PREFILL_TOKENS = 8192  # prompt tokens of a step on a GPU
# Fractions of the free memory for the KV pool if --mem-fraction-static is not set.
CUDA_FRACTION, OTHER_FRACTION = 0.8, 0.2


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """Computation (worker_proc)."""

    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps", unit="DEVICE", basic=True)
    dtype: str = flag(
        "auto",
        "auto: bfloat16 where it is multiplied fast (on a CPU by the native kernels), else float32",
        ("auto", "float32", "bfloat16", "float16"),
        basic=True,
    )
    page_size: int = flag(16, "tokens in one KV page", unit="TOKENS")
    max_total_tokens: int | None = flag(None, "size of the KV pool in tokens", unit="TOKENS")
    mem_fraction_static: float | None = flag(
        None,
        "share of the free memory for the KV pool, in (0, 1) (default: 0.8 on CUDA, 0.2 elsewhere)",
        unit="FRACTION",
        basic=True,
    )
    attention_backend: str = flag(
        "auto",
        "native: kernels for a CPU, compiled at first use; triton: kernels for CUDA; flashinfer:"
        " the same, but FlashInfer for attention; torch: plain torch, anywhere (auto: triton on"
        " CUDA, native on a CPU where a C++ compiler is found)",
        ("auto", "native", "triton", "flashinfer", "torch"),
    )
    disable_cuda_graph: bool = flag(False, "disable CUDA graphs")
    enable_deterministic_inference: bool = flag(
        False,
        "the same output to the last bit, whatever else is in the batch. The native kernels of a"
        " CPU always do that; on CUDA it is slower; other ways to compute refuse to start",
    )
    quantization: str = flag(
        "auto",
        "how weights are kept; all but none and auto need the kernels of a CPU, or on a GPU the"
        " extra gpu. auto: a GGUF or a quantized checkpoint as stored (with --dtype float32: in"
        " --dtype), any other model in --dtype; none: in --dtype; gguf: as stored in the GGUF;"
        " int8, int4: rounded at the start, in groups of 32. On a CPU, inputs of weights with 8"
        " bits or fewer are rounded to 8 bits, too",
        ("auto", "none", "int8", "int4", "gguf"),
        basic=True,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "keys and values: as --dtype, or in 8 bits, for twice the tokens (int8 on a CPU, fp8 on"
        " CUDA)",
        ("auto", "int8", "fp8"),
    )
    kv_cache_dir: str = flag(
        "",
        "directory for KV pages on disk, so that prompts that were computed before a restart are"
        " not computed again: see docs/kv-cache.md",
        unit="DIR",
    )
    kv_cache_dir_size: float = flag(
        10.0, "size of all files in --kv-cache-dir; the least recently used go first", unit="GIB"
    )
    kv_offloading_size: float = flag(
        0.0,
        "host memory for KV pages that do not fit the pool (vLLM's name; SGLang's is"
        " --hicache-size)",
        unit="GIB",
    )
    tp: int = flag(
        1, "tensor parallelism: processes that share each layer, one device each", basic=True
    )
    worker_threads: int | None = flag(
        None, "CPU threads of the worker (default: by the number of cores)"
    )
    numa_node: str = flag(
        "auto",
        "NUMA node of a CPU worker's threads and memory: a number, all for any, or auto: one node,"
        " and another one for each further replica",
        unit="NODE",
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "page_size", "max_total_tokens", "worker_threads")
        check_positive(self, "tp")
        if self.numa_node not in NUMA_WORDS and not self.numa_node.isdecimal():
            raise ConfigError(
                f"numa_node is {self.numa_node!r}: it must be auto, all, or a number of a node"
            )
        self._validate_tp()
        self._validate_offload()
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"mem_fraction_static is {fraction}: it must be between 0 and 1")
        if self.kv_cache_dtype == "int8" and self.page_size % 16:
            raise ConfigError(
                "kv_cache_dtype int8 needs a page_size that is a multiple of 16 (it is"
                f" {self.page_size})"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"max_total_tokens is {self.max_total_tokens}: it must be at least one page"
                f" of {self.page_size} tokens"
            )
        if self.max_total_tokens is not None and self.max_total_tokens % self.page_size:
            raise ConfigError(
                f"max_total_tokens is {self.max_total_tokens}: page_size {self.page_size} does not"
                f" divide it; {self.max_total_tokens // self.page_size * self.page_size} would fit"
            )

    def _validate_tp(self) -> None:
        if self.tp == 1:
            return
        for feature, is_set in (
            ("attention_backend native", self.attention_backend == "native"),
            (f"quantization {self.quantization}", self.quantization not in ("auto", "none")),
            ("kv_cache_dtype int8", self.kv_cache_dtype == "int8"),
            ("enable_deterministic_inference", self.enable_deterministic_inference),
            (self.offload_flags, self.has_offload),
        ):
            if is_set:
                raise ConfigError(f"tp is {self.tp}: {feature} works with one process only")

    def check_self_draft(self) -> None:
        """Raise ConfigError if the model cannot draft its own tokens in 4 bits."""
        for flags, is_set in (
            (f"quantization {self.quantization}", self.quantization in ("int4", "gguf")),
            (f"attention_backend {self.attention_backend}",
             self.attention_backend not in ("auto", "native")),
            (f"tp {self.tp}", self.tp != 1),
        ):  # fmt: skip
            if is_set:
                raise ConfigError(
                    "speculative_method self lets a copy of the weights in 4 bits draft on a CPU,"
                    f" which does not work with {flags}: take --speculative-method auto"
                )

    @property
    def has_offload(self) -> bool:
        """Whether there are KV pages beyond the pool."""
        return bool(self.kv_cache_dir) or self.kv_offloading_size > 0

    @property
    def offload_flags(self) -> str:
        """The given flags of KV pages beyond the pool, as the command line spells them."""
        directory = "--kv-cache-dir" if self.kv_cache_dir else ""
        memory = "--kv-offloading-size" if self.kv_offloading_size else ""
        return " and ".join(filter(None, (directory, memory)))

    def _validate_offload(self) -> None:
        check_positive(self, "kv_cache_dir_size")
        if not self.kv_offloading_size >= 0:
            raise ConfigError(
                f"kv_offloading_size is {self.kv_offloading_size}: it must be 0 (no memory beyond"
                " the pool) or more"
            )


BY_CACHE, BY_LOAD, IN_TURN = LOAD_BALANCE_METHODS = ("cache-aware", "least-loaded", "round-robin")
ONE_MACHINE, RAY = CLUSTERS = ("none", "ray")
NEEDS_CLUSTER = "works with --cluster ray only"
# Of the number of replicas that follows the load.
TARGET_REQUESTS, UP_AFTER_S, DOWN_AFTER_S = 32, 5.0, 300.0

# Of the directories in --journal.
NUMA_WORDS = ("auto", "all")  # values of --numa-node beside numbers
REPLICA_PREFIX = "replica-"

# Of a flag: a number, or as many as the load asks for.
AUTO: Literal["auto"] = "auto"
CountOrAuto = int | Literal["auto"]
CLUSTER_FLAGS = ("replica_cpus", "nnodes", "max_replicas", "role_resources")
PREFILL, DECODE = ROLES = ("prefill", "decode")
SCALING_FLAGS = ("min_replicas", "target_ongoing_requests", "scale_down_after")


@dataclass(frozen=True, slots=True)
class ReplicaArgs:
    """Replicas (launcher.py, tokenizer_proc, cluster_proc)."""

    dp: int = flag(
        1,
        "replicas of the model, each with scheduler, worker and detokenizer of its own, behind one"
        " endpoint: see docs/gpus-and-replicas.md",
        alias="data_parallel_size",
    )
    load_balance_method: str = flag(
        BY_CACHE,
        "choice of the replica of a request. cache-aware: by its cached prefix and by load",
        LOAD_BALANCE_METHODS,
    )
    prefill_replicas: int | Literal["auto"] = flag(
        0,
        "as many of the --dp replicas compute long prompts, and hand each request with its KV pages"
        " on to one of the others, which generate tokens; auto: as many as the load asks for, none"
        " at times: see docs/prefill-and-decode.md",
        unit="N",
    )
    role_resources: str = flag(
        "",
        "Ray's custom resource that the machines of a role have, such as an accelerator of another"
        " kind: prefill=NAME, decode=NAME or both, separated by a comma",
        unit="ROLE=NAME",
    )
    cluster: str = flag(
        ONE_MACHINE,
        "machines of the replicas. none: this one; ray: those of the Ray cluster of this machine or"
        " of RAY_ADDRESS, on which Ray places each replica",
        CLUSTERS,
    )
    replica_cpus: float = flag(1.0, "CPUs of its machine that Ray sets aside for a replica")
    nnodes: int | None = flag(
        None,
        "machines of each replica, over which its --tp ranks are split (default: 1, or as few as"
        " have enough GPUs)",
    )
    min_replicas: int | None = flag(
        None, "minimum number of replicas when autoscaling (default: 1)"
    )
    max_replicas: int | None = flag(
        None,
        "maximum number of replicas: their number follows the load (autoscaling), from --dp on"
        " (default: there are always --dp)",
    )
    target_ongoing_requests: int = flag(
        TARGET_REQUESTS, "open requests for each replica when autoscaling"
    )
    scale_down_after: float = flag(
        DOWN_AFTER_S,
        "time in which one replica less would be enough, before one leaves",
        unit="SECONDS",
    )
    # No flag; tests scale up at once.
    scale_up_after: float = UP_AFTER_S

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "dp", "replica_cpus", "nnodes", "min_replicas", "max_replicas")
        check_positive(self, "target_ongoing_requests")
        if not self.scale_down_after >= 0:
            raise ConfigError(f"scale_down_after must be 0 or more (it is {self.scale_down_after})")
        for name in CLUSTER_FLAGS:
            if self.cluster == ONE_MACHINE and getattr(self, name) != _default(name):
                raise ConfigError(f"{name} {NEEDS_CLUSTER}")
        for name in SCALING_FLAGS:
            if self.max_replicas is None and getattr(self, name) != _default(name):
                raise ConfigError(f"{name} works with --max-replicas only")
        self._check_roles()
        self._check_bounds()

    def _check_roles(self) -> None:
        number = self.prefill_replicas
        if not isinstance(number, int):
            self._check_roles_that_change()
        elif not 0 <= number < self.dp:
            raise ConfigError(
                f"prefill_replicas is {number} and dp is {self.dp}: at least one replica must be"
                f" left for tokens; start with --dp {number + 1} or more"
                if number > 0
                else f"prefill_replicas must be 0 or more (it is {number})"
            )
        if self.has_roles and self.follows_load:
            raise ConfigError(
                "prefill_replicas works with a fixed number of replicas: leave --max-replicas out"
            )
        for item in filter(None, self.role_resources.split(",")):
            role, _, resource = item.partition("=")
            if role not in ROLES or not resource:
                raise ConfigError(
                    f"role_resources has {item!r}: it must be ROLE=NAME with a role of"
                    f" {' or '.join(ROLES)}, such as prefill=h100"
                )
        if self.role_resources and not self.has_roles:
            raise ConfigError("role_resources works with --prefill-replicas only")

    def _check_roles_that_change(self) -> None:
        if self.dp < 2:
            raise ConfigError(
                f"prefill_replicas is {AUTO} and dp is {self.dp}: start with --dp 2 or more"
            )
        if self.role_resources:
            raise ConfigError(
                f"prefill_replicas is {AUTO}, so that no machine has a role: leave"
                " --role-resources out, or give a number"
            )

    def _check_bounds(self) -> None:
        low, high = self.num_at_least, self.num_slots
        if low > high:
            raise ConfigError(
                f"min_replicas is {low} and max_replicas is {high}: the first must not be larger"
            )
        if self.dp > high:
            raise ConfigError(
                f"dp is {self.dp} and max_replicas is {high}: start with {high} or less"
            )

    @property
    def has_roles(self) -> bool:
        """Whether some replicas compute prompts for the others, or may do so."""
        return self.max_prefill_replicas > 0

    @property
    def max_prefill_replicas(self) -> int:
        """How many replicas compute prompts for the others, the first ones, or may do so."""
        number = self.prefill_replicas
        return number if isinstance(number, int) else self.dp - 1

    def computes_prompts(self, number: int) -> bool:
        """Return whether a replica computes prompts for the others, or may do so."""
        return number < self.max_prefill_replicas

    def role_of(self, number: int) -> str:
        """Return the role of a replica, one of ROLES.

        AUTO where roles follow the load; "" where replicas have none.
        """
        if not isinstance(self.prefill_replicas, int):
            return AUTO
        if not self.has_roles:
            return ""
        return PREFILL if self.computes_prompts(number) else DECODE

    def resource_of(self, role: str) -> str:
        """Return the resource that the machines of a role have; "": any machine will do."""
        pairs = (item.partition("=") for item in self.role_resources.split(","))
        return next((name for other, _, name in pairs if role and other == role), "")

    @property
    def follows_load(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    @property
    def num_slots(self) -> int:
        """Maximum number of replicas."""
        return self.dp if self.max_replicas is None else self.max_replicas

    @property
    def num_at_least(self) -> int:
        """Minimum number of replicas."""
        return self.dp if self.max_replicas is None else self.min_replicas or 1

    @property
    def num_at_start(self) -> int:
        """Number of replicas at the start."""
        return max(self.dp, self.num_at_least)

    @property
    def in_cluster(self) -> bool:
        """Whether replicas are on the machines of a cluster."""
        return self.cluster != ONE_MACHINE

    @property
    def survives_loss(self) -> bool:
        """Whether the server goes on where a replica is lost: there are others, or a new one."""
        return self.dp > 1 or self.in_cluster

    def process_name(self, program: str, number: int) -> str:
        """Return what a process of a replica is called. It has a number where there are several."""
        return f"{program}/{number}" if self.survives_loss else program

    def place_of(self, number: int) -> "ReplicaPlace":
        """Return which part of its machine a replica has. In a cluster it has all that it sees."""
        if self.in_cluster:
            return ReplicaPlace(num_machines=self.nnodes or 1)
        return ReplicaPlace(number, self.dp)


def _default(name: str) -> Any:
    return next(field.default for field in fields(ReplicaArgs) if field.name == name)


def journal_dir(journal: str, number: int) -> Path:
    """Return the directory of one replica's journal, among several. journal: --journal."""
    return Path(journal) / f"{REPLICA_PREFIX}{number}"


class ReplicaPlace(NamedTuple):
    """Which replica of its machine a process belongs to, from 0 on, and how many there are.

    Attributes:
        num_machines: number of machines over which the ranks of the replica are split.
    """

    number: int = 0
    num_replicas: int = 1
    num_machines: int = 1

    def ranks_per_machine(self, tp: int) -> int:
        """Return how many of `tp` ranks are on each machine of the replica."""
        return tp // self.num_machines


ONLY_REPLICA = ReplicaPlace()


def check_replica(number: int, num_replicas: int) -> None:
    """Raise InvalidRequest if a server of `num_replicas` has no replica of this number."""
    if not 0 <= number < num_replicas:
        there = "the only one is 0" if num_replicas == 1 else f"0 to {num_replicas - 1} are there"
        raise InvalidRequest(f"replica is {number}: {there}", "replica")
