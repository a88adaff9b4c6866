"""The environment variables that the project reads; docs/configuration.md is made from them."""

from typing import NamedTuple


class EnvironmentVariable(NamedTuple):
    """A variable and its row in the docs.

    Attributes:
        default: value that an unset variable stands for, in words; "": none.
        meaning: what the variable changes.
    """

    name: str
    default: str
    meaning: str


# Variables that this project's code reads.
READ_HERE = (
    EnvironmentVariable(
        "QUADRIGA_CACHE",
        "`$XDG_CACHE_HOME/quadriga`",
        "directory of the built-in model, the headers of GGUFs and the compiled kernels",
    ),
    EnvironmentVariable("XDG_CACHE_HOME", "`~/.cache`", "directory of all caches of a user"),
    EnvironmentVariable(
        "QUADRIGA_API_KEY", "", "server: as `--api-key`, but shown by no process list"
    ),
    EnvironmentVariable(
        "OTEL_EXPORTER_OTLP_HEADERS",
        "",
        "headers for the collector of `--otlp-endpoint`, as `name=value,name=value`",
    ),
    EnvironmentVariable("OTEL_SERVICE_NAME", "`quadriga`", "name of the server in its traces"),
    EnvironmentVariable("OPENAI_API_KEY", "", "`quadriga bench`: key for an OpenAI-compatible URL"),
    EnvironmentVariable(
        "QUADRIGA_PROCESS_HOOK",
        "",
        "`MODULE:FUNCTION` that every process calls with its name at its start, for debugging",
    ),
    EnvironmentVariable(
        "QUADRIGA_BENCH_STEP_MS", "", "set by `bench.frontend_speed`: ms of a step of its workers"
    ),
    EnvironmentVariable("CXX", "`g++`, `clang++` or `c++`", "C++ compiler of the CPU kernels"),
    EnvironmentVariable(
        "QUADRIGA_KERNEL_ARCH", "`native`", "`-march` of the CPU kernels, such as `x86-64-v3`"
    ),
    EnvironmentVariable(
        "OMP_WAIT_POLICY", "", "if set, `GOMP_SPINCOUNT` keeps the value that OpenMP gives it"
    ),
    EnvironmentVariable(
        "GOMP_SPINCOUNT",
        "set by the worker",
        "how long the kernels' threads spin before they sleep",
    ),
    EnvironmentVariable(
        "GLOO_SOCKET_IFNAME",
        "`lo`; over several machines that of the machine's address",
        "network interface of tensor parallelism on CPUs",
    ),
    EnvironmentVariable(
        "NCCL_SOCKET_IFNAME",
        "over several machines that of the machine's address",
        "network interface of tensor parallelism on GPUs",
    ),
    EnvironmentVariable(
        "TRITON_INTERPRET", "", "`1`: run the Triton kernels without a GPU, slowly"
    ),
    EnvironmentVariable("TERM", "", "`dumb`: no live status line"),
    EnvironmentVariable("NO_COLOR", "", "if set: `quadriga ask` and `chat` print no dim text"),
)
# Variables that libraries read, with an effect on a server.
READ_BY_LIBRARIES = (
    EnvironmentVariable("HF_HOME", "`~/.cache/huggingface`", "cache of models from the Hub"),
    EnvironmentVariable("HF_TOKEN", "", "token for gated and private models of the Hub"),
    EnvironmentVariable("HF_HUB_OFFLINE", "", "`1`: use only models that the Hub's cache holds"),
    EnvironmentVariable("PIP_INDEX_URL", "", "package index that the built-in model comes from"),
    EnvironmentVariable("TMPDIR", "`/tmp`", "directory of the run directory: sockets and journal"),
)
