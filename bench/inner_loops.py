"""Count the cycles of the CPU kernels' inner loops by llvm-mca, for CPUs that are not here.

    python -m bench.inner_loops
    python -m bench.inner_loops --peer libggml-cpu.so --peer-function ggml_vec_dot_q4_0_q8_0

Each inner loop is compiled for a level of CPUs, and llvm-mca simulates it as straight-line code
with all memory in the first-level cache. What a product reaches on a machine is at most that, and
the speed of memory for few rows. The unit's peak is that of the same multiplying instruction alone.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker_proc.cpu.levels import FLAGS, MACHINE_FLAGS, SOURCES

MCA_NAMES = ("llvm-mca-22", "llvm-mca")
ITERATIONS = 100
# Multiply-adds of an instruction, by its name and the vectors it takes.
MULTIPLY_ADDS = {
    "usmmla": 32, "smmla": 32, "usdot": 16, "sdot": 16, "bfmmla": 16, "bfdot": 8,
    "vpdpbusd zmm": 64, "vpdpbusd ymm": 32, "vdpbf16ps zmm": 32,
}  # fmt: skip
FORMATS = {
    "Q8_0": "QuantizedFormat<Codes<8>, GroupScales<false>, 128>",
    "Q4_0": "QuantizedFormat<Codes<4>, GroupScales<false>, 8>",
    "Q4_K": "QuantizedFormat<Codes<4>, BlockScales<1, true>, 0>",
    "Q6_K": "QuantizedFormat<Codes<4, 2>, BlockScales<2, false>, 32>",
}
INCLUDES = '#include "quantized.h"\n#include "quantized/product.h"\n#include "dense.h"\n'
QUANTIZED_TEMPLATE = (
    "template void quantized_product<{type}, {rows}, TILE_PANELS>(float*, long, const uint32_t*,"
    " long, const uint32_t*, long, long, const Prefetch&, int);"
)
DENSE_TEMPLATE = (
    "TileProduct chosen() {{ return Dense<BFloat16Pairs>::tile(DENSE, {rows}, TILE_PANELS); }}"
)


@dataclass(frozen=True, slots=True)
class Target:
    """CPUs for which loops are compiled.

    Attributes:
        flags: of the compiler.
        cpus: what llvm-mca simulates.
        rows: of the largest tile with quantized weights, and with bfloat16.
    """

    compiler: str
    flags: tuple[str, ...]
    triple: str
    cpus: tuple[str, ...]
    rows: int
    dense_rows: int


ARM = "aarch64-linux-gnu"
TARGETS = {
    "i8mm": Target(f"{ARM}-g++", ("-march=armv8.6-a+bf16+i8mm",), ARM,
                  ("neoverse-v1", "neoverse-v2", "neoverse-n2"), 8, 6),
    "dotprod": Target(f"{ARM}-g++", ("-march=armv8.2-a+dotprod",), ARM,
                     ("neoverse-n1", "neoverse-v1", "neoverse-v2"), 4, 0),
    "arm64, compiler's own": Target(f"{ARM}-g++", ("-march=armv8.6-a+bf16+i8mm", "-DPORTABLE"), ARM,
                                   ("neoverse-v1", "neoverse-v2", "neoverse-n2"), 2, 0),
    "AVX-512": Target("g++", ("-march=sapphirerapids", "-DNO_TILES"), "x86_64",
                     ("znver5", "sapphirerapids"), 4, 8),
}  # fmt: skip


def find_mca() -> str:
    """Return the newest llvm-mca's command."""
    for name in MCA_NAMES:
        if shutil.which(name):
            return name
    sys.exit("llvm-mca is not here: install llvm-22")


def _run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr[:2000]}")
    return done.stdout


def inner_loop(assembly: str) -> list[str]:
    """Return the smallest loop with most of the multiplying instructions of a function.

    Args:
        assembly: lines of labels and instructions, without directives.
    """
    lines = assembly.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    weights = [1 if multiply_adds([line]) or "\tmla\t" in line else 0 for line in lines]
    loops = []
    for i, line in enumerate(lines):
        target = line.split()[-1].lstrip("#") if line.startswith("\t") else ""
        begin = labels.get(target, i)
        if begin < i and re.match(r"\t(b|j|cb|tb)", line):
            loops.append((sum(weights[begin:i]), begin, i))
    most = max((count for count, *_ in loops), default=0)
    if not most:
        return []
    _, begin, end = min(
        (loop for loop in loops if loop[0] >= 0.9 * most), key=lambda loop: loop[2] - loop[1]
    )
    # Branches within are not taken, as those that skip a prefetch.
    return [
        line
        for line in lines[begin:end]
        if line.startswith("\t") and not re.match(r"\t(b|b\.\w+|cbn?z|tbn?z|j\w+|call|bl)\s", line)
    ]


def multiply_adds(lines: list[str]) -> int:
    """Return the multiply-adds of all multiplying instructions."""
    total = 0
    for line in lines:
        name = line.split()[0] if line.split() else ""
        vectors = "zmm" if "zmm" in line else "ymm" if "ymm" in line else ""
        total += MULTIPLY_ADDS.get(f"{name} {vectors}".strip(), 0)
    return total


def cycles(mca: str, triple: str, cpu: str, lines: list[str]) -> float:
    """Return the cycles of an iteration of a loop."""
    attributes = ["-mattr=+i8mm,+bf16,+dotprod"] if triple == ARM else []
    command = [mca, f"-mtriple={triple}", f"-mcpu={cpu}", *attributes, f"-iterations={ITERATIONS}"]
    report = _run(command, "\n".join(lines) + "\n")
    found = re.search(r"Total Cycles:\s+(\d+)", report)
    assert found is not None
    return int(found[1]) / ITERATIONS


def peak(mca: str, triple: str, cpu: str, lines: list[str]) -> float:
    """Return the multiply-adds in a cycle of the loop's multiplying instructions alone."""
    name = max((line for line in lines if multiply_adds([line])), key=lambda x: multiply_adds([x]))
    name = name.split()[0]
    if triple == ARM:
        width = "8h" if name.startswith("bf") else "16b"
        alone = [f"\t{name}\tv{i}.4s, v30.{width}, v31.{width}" for i in range(24)]
    else:
        alone = [f"\t{name}\t%zmm30, %zmm31, %zmm{i}" for i in range(24)]
    return multiply_adds(alone) / cycles(mca, triple, cpu, alone)


def compile_loop(target: Target, source: str) -> list[str]:
    """Compile one product, and return its inner loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one.cpp"
        path.write_text(INCLUDES + source + "\n")
        machine = MACHINE_FLAGS["aarch64"] if target.triple == ARM else ()
        options = (*FLAGS, *machine, *target.flags, "-fno-asynchronous-unwind-tables")
        command = [target.compiler, *options]
        text = _run([*command, "-I", str(SOURCES), "-S", "-o", "-", str(path)])
    best: list[str] = []
    for function in re.split(r"\n(?=_Z\w+:)", text):
        kept = [line for line in function.splitlines() if not line.startswith("\t.")]
        loop = inner_loop("\n".join(line for line in kept if not line.startswith("#")))
        if multiply_adds(loop) > multiply_adds(best) or len(loop) > len(best):
            best = loop
    return best


def cases(target: Target) -> Iterator[tuple[str, int, str, int]]:
    """Yield the products of a target: name, rows, source, and multiply-adds of an iteration.

    The multiply-adds are 0 where the instructions tell them.
    """
    for name, form in FORMATS.items():
        for rows in (target.rows, 1):
            own = rows * 32 * 16 if "-DPORTABLE" in target.flags else 0
            yield name, rows, QUANTIZED_TEMPLATE.format(type=form, rows=rows), own
    if target.dense_rows:
        yield "bfloat16", target.dense_rows, DENSE_TEMPLATE.format(rows=target.dense_rows), 0


def report_own(mca: str) -> None:
    """Print a line for each product, target and CPU."""
    print("| product | rows | compiled for | CPU | cycles / 1,000 multiply-adds | of the peak |")
    print("|---|---|---|---|---|---|")
    for target_name, target in TARGETS.items():
        for name, rows, source, own in cases(target):
            loop = compile_loop(target, source)
            count = own or multiply_adds(loop)
            for cpu in target.cpus:
                taken = cycles(mca, target.triple, cpu, loop)
                share = "" if own else f"{count / taken / peak(mca, target.triple, cpu, loop):.0%}"
                cells = (name, rows, target_name, cpu, f"{1000 * taken / count:.1f}", share)
                print("|", " | ".join(map(str, cells)), "|", flush=True)


def report_peer(mca: str, library: Path, function: str, triple: str, cpus: list[str]) -> None:
    """Print the cycles of the inner loop of a function of a compiled library."""
    objdump = "objdump" if triple == "x86_64" else f"{ARM}-objdump"
    listing = _run([objdump, "-d", "--no-show-raw-insn", f"--disassemble={function}", str(library)])
    lines = []
    for line in listing.splitlines():
        if found := re.match(r"\s+([0-9a-f]+):\t(.*)", line):
            code = re.sub(r"\s*(<.*>|//.*|# .*)$", "", found[2].replace("{vex} ", "")).strip()
            code = re.sub(r"^(\S+)\s+", r"\1\t", code)
            lines += [f"{found[1]}:", f"\t{code}"]
    loop = inner_loop("\n".join(lines))
    count = multiply_adds(loop)
    if not count:
        sys.exit(f"{function} has no loop with a multiplying instruction")
    for cpu in cpus:
        taken = cycles(mca, triple, cpu, loop)
        share = count / taken / peak(mca, triple, cpu, loop)
        print(f"| {function} | {cpu} | {1000 * taken / count:.1f} | {share:.0%} |")


def main() -> None:
    """Report the kernels' own loops, or a peer's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer", type=Path, help="a compiled library")
    parser.add_argument("--peer-function", default="ggml_vec_dot_q4_0_q8_0")
    parser.add_argument("--triple", choices=(ARM, "x86_64"), default="x86_64")
    parser.add_argument("--cpus", nargs="+", default=["znver5", "sapphirerapids"])
    args = parser.parse_args()
    mca = find_mca()
    if args.peer:
        report_peer(mca, args.peer, args.peer_function, args.triple, args.cpus)
    else:
        report_own(mca)


if __name__ == "__main__":
    main()
