"""`python -m quadriga.server.config --markdown` prints docs/configuration.md.

The environment variables that the project reads are listed here, for that page.
"""

import argparse
import dataclasses
import re
from typing import Any, NamedTuple

from quadriga.server.config.flags import (
    FOREIGN_FLAGS,
    REMOVED_FLAGS,
    flag_fields,
    flag_name,
    metavar,
)
from quadriga.server.config.server_config import ServerConfig, help_text

DAY_S = 24 * 3600


class EnvironmentVariable(NamedTuple):
    """A variable and its row in the docs.

    Attributes:
        default: value of an unset variable, in words; "": none.
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
        "PYTHONHASHSEED", "`0`", "seed of the hashes of `--kv-events-config`, as in vLLM"
    ),
    EnvironmentVariable("OTEL_SERVICE_NAME", "`quadriga`", "name of the server in its traces"),
    EnvironmentVariable("OPENAI_API_KEY", "", "`quadriga bench`: key for an OpenAI-compatible URL"),
    EnvironmentVariable(
        "QUADRIGA_PROCESS_HOOK",
        "",
        "`MODULE:FUNCTION` that every process calls with its name at its start, for debugging",
    ),
    EnvironmentVariable(
        "QUADRIGA_BENCH_STEP_MS", "", "ms of a step of `bench.paced_worker`, which computes nothing"
    ),
    EnvironmentVariable(
        "QUADRIGA_GPU_STEPS", "", "`plain`: decode steps of a GPU by cuBLAS, for comparisons"
    ),
    EnvironmentVariable("TORCH_CPP_LOG_LEVEL", "`ERROR`", "what torch's C++ code logs in a worker"),
    EnvironmentVariable("CXX", "`g++`, `clang++` or `c++`", "C++ compiler of the CPU kernels"),
    EnvironmentVariable(
        "QUADRIGA_KERNEL_ARCH", "`native`", "`-march` of the CPU kernels, such as `x86-64-v3`"
    ),
    EnvironmentVariable(
        "QUADRIGA_KERNEL_ISA",
        "",
        "instructions that the CPU kernels must or must not use, with commas between them: `amx`,"
        " `no-amx`, `pairs` (of bfloat16), `no-pairs`",
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
        "RAY_ADDRESS", "the cluster of this machine", "address of the cluster of `--cluster ray`"
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
    EnvironmentVariable(
        "OTEL_EXPORTER_OTLP_HEADERS",
        "",
        "headers for the collector of `--otlp-endpoint`, as `name=value,name=value`",
    ),
    EnvironmentVariable(
        "OTEL_EXPORTER_OTLP_CERTIFICATE",
        "certifi's",
        "certificate authorities for the collector of `--otlp-endpoint`",
    ),
    EnvironmentVariable("TMPDIR", "`/tmp`", "directory of the run directory: sockets and journal"),
)


HEADER = """\
# Configuration

<!-- Made by `python -m quadriga.server.config --markdown > docs/configuration.md`. Do not edit. -->

The flags of `quadriga serve`. `--help` shows those in bold, `--help-all` all of them. \
[Which flags for my hardware](hardware.md) and [Tune](tune.md) say when to change one, and \
[Limits](limits.md) what happens beyond a bound.

```bash
quadriga serve MODEL --max-batch-size 32 --quantization int8
```

`quadriga serve MODEL` is short for `--model MODEL`. An unknown flag is an error that names \
similar flags, and for a flag of vLLM, SGLang or llama.cpp the flag here.

**A file of flags.** `--config server.yaml` reads flags without their dashes, one in each line. \
A list is one text with commas. The command line takes precedence.

```yaml
model: Qwen/Qwen2.5-0.5B-Instruct
max-batch-size: 32
```
"""


def markdown() -> str:
    """Return the page of all flags."""
    tables = [_table(group) for group in ServerConfig().groups()]
    environment = [
        "## Environment variables\n",
        _variables("The project reads:", READ_HERE),
        _variables("Libraries read, with an effect on a server:", READ_BY_LIBRARIES),
    ]
    return "\n".join([HEADER, *tables, _removed(), _other_servers(), *environment])


def _other_servers() -> str:
    rows = [
        f"| {foreign.servers} | `{name}` | {_as_code(foreign.here)} |"
        for name, foreign in FOREIGN_FLAGS.items()
    ]
    head = ["## Flags of other servers\n", "| server | flag | here |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _removed() -> str:
    rows = [f"| `{name}` | {_as_code(text)} |" for name, text in REMOVED_FLAGS.items()]
    head = ["## Flags of earlier versions\n", "| flag | now |", "|---|---|"]
    return "\n".join([*head, *rows, ""])


def _as_code(text: str) -> str:
    """Return the text with its flags marked as code."""
    return re.sub(r"--[a-z-]+", lambda match: f"`{match[0]}`", text)


def _variables(title: str, variables: tuple[EnvironmentVariable, ...]) -> str:
    rows = [f"| `{v.name}` | {v.default} | {v.meaning} |" for v in variables]
    head = [f"{title}\n", "| variable | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _table(group: Any) -> str:
    title = (group.__doc__ or "").rstrip(".")
    rows = [_row(field) for field in flag_fields(group)]
    head = [f"## {title}\n", "| flag | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _row(field: "dataclasses.Field[Any]") -> str:
    names = [field.name]
    if field.metadata["alias"] and not field.metadata["alias_value"]:
        names.append(field.metadata["alias"])
    value = "" if field.type is bool or field.metadata["choices"] else f" {metavar(field)}"
    flags = ", ".join(f"`{flag_name(name)}{value}`" for name in names)
    flags = f"**{flags}**" if field.metadata["basic"] else flags
    text = re.sub(r"\bdocs/([\w/-]+)\.md", r"[\1](\1.md)", help_text(field))
    if field.metadata["choices"]:
        text += f". One of {', '.join(f'`{choice}`' for choice in field.metadata['choices'])}"
    return f"| {flags} | {_default(field)} | {text} |"


def _default(field: "dataclasses.Field[Any]") -> str:
    """Return the default of a flag; that of bytes and of days also in these units."""
    default: Any = field.default
    if default is None or default is False or default == "":
        return ""
    more = ""
    if field.metadata["unit"] == "BYTES":
        more = f" ({default // 2**30} GiB)" if default >= 2**30 else f" ({default // 2**20} MiB)"
    elif field.metadata["unit"] == "SECONDS" and default >= DAY_S:
        more = f" ({default / DAY_S:g} days)"
    return f"`{default}`{more}"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser("python -m quadriga.server.config")
    parser.add_argument("--markdown", action="store_true", required=True, help="print the page")
    parser.parse_args()
    print(markdown(), end="")


if __name__ == "__main__":
    main()
