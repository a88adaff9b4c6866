"""WorkerArgs: the flags of worker_proc."""

from dataclasses import dataclass

from quadriga.config.flags import check_positive, flag
from quadriga.errors import ConfigError

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
    cuda_graph_max_bs: int | None = flag(
        None,
        "largest decode step, in rows, that runs as a CUDA graph (default: --max-batch-size)",
        unit="ROWS",
    )
    disable_cuda_graph: bool = flag(False, "launch every kernel by itself in decode steps, too")
    enable_nvtx: bool = flag(False, "mark the parts of each step for NVIDIA's profilers")
    enable_deterministic_inference: bool = flag(
        False,
        "output that is bitwise the same whatever else is in the batch: slower on CUDA; the native"
        " kernels of a CPU always give it, and the flag refuses to start without them",
    )
    quantization: str = flag(
        "auto",
        "how weights are kept. auto: those of a quantized GGUF or checkpoint as stored, where the"
        " kernels of a CPU have its types and --dtype is not float32, else in --dtype; none: in"
        " --dtype; gguf: as stored in the GGUF; int8, int4: in groups of 32, of any other model."
        " Where weights have 8 bits or fewer, inputs are rounded to 8 bits as they are multiplied",
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
        "memory of the computer for KV pages that the pool has no room for, beyond the pool"
        " (vLLM's name; SGLang's is --hicache-size)",
        unit="GIB",
    )
    tp: int = flag(
        1,
        "tensor parallelism: processes that share each layer, one device each",
        basic=True,
    )
    worker_threads: int | None = flag(
        None, "CPU threads of the worker (default: by the number of cores)"
    )
    no_affinity: bool = flag(
        False, "let every process run on every core, even if the worker could have its own cores"
    )

    def validate(self) -> None:
        """Raise ConfigError for the first flag that cannot work."""
        check_positive(self, "page_size", "max_total_tokens", "worker_threads")
        check_positive(self, "cuda_graph_max_bs", "tp")
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
