"""Time products with each quantized type of a GGUF: `python -m bench.roofline.formats`.

Prints the microseconds of a product of several rows of inputs with a matrix of random weights, and
in brackets the floor: the longer one of the times to read the matrix at the speed of memory, and to
do the operations at the rate of a matrix in Q8_0 that stays in the caches.
"""

import sys
from collections.abc import Sequence

import torch

from bench.cli.command import EXIT_OK, command_parser, run_command
from bench.report.table import markdown_table
from bench.roofline.machine_speed import CPU, READ_BYTES, OneProduct, ReadSpeed, least_seconds
from bench.roofline.roofline_model import Product
from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.models.formats.quantization import BLOCK_SIZES
from worker_proc.engines.factory import make_engine
from worker_proc.models.quantized_weights import PackedRows

ROWS = (1, 8, 32)
CACHED = Product(2048, 1024)
CACHED_ROWS = 32
NUM_ROUNDS = 10
# Random bytes below this bit are scales in float16 that are finite and not too small to be fast.
BYTE_MASK = 0x3F


class FormatProduct:
    """A product with random weights of one type."""

    def __init__(self, kind: str, product: Product, args: WorkerArgs) -> None:
        size = BLOCK_SIZES[kind]
        self.num_bytes = product.inputs // size.weights * size.num_bytes * product.outputs
        data = torch.randint(0, BYTE_MASK + 1, (product.outputs, self.num_bytes // product.outputs))
        model = OneProduct(product)
        model.linear.blocks = (PackedRows(kind, data.to(torch.uint8)),)
        self._engine = make_engine(args, model, 1, torch.float32, CPU)
        self._inputs = product.inputs

    @torch.inference_mode()
    def measure(self, rows: int) -> float:
        """Return the seconds of a product of `rows` rows, with their norm."""
        x = torch.randn(rows, self._inputs)
        return least_seconds(lambda: self._engine.logits(x))


def measure_all(product: Product, args: WorkerArgs) -> str:
    """Return the tables of all types in markdown: the least time of several rounds counts."""
    timed = {kind: FormatProduct(kind, product, args) for kind in BLOCK_SIZES}
    cached, reads = FormatProduct("Q8_0", CACHED, args), ReadSpeed(args, torch.float32, READ_BYTES)
    seconds: dict[tuple[str, int], float] = {}
    read_rate = rate = 0.0
    for _ in range(NUM_ROUNDS):
        read_rate = max(read_rate, reads.measure())
        rate = max(rate, CACHED.operations(CACHED_ROWS) / cached.measure(CACHED_ROWS))
        for kind, work in timed.items():
            for rows in ROWS:
                spent = work.measure(rows)
                seconds[kind, rows] = min(spent, seconds.get((kind, rows), spent))
    lines = []
    for kind, work in timed.items():
        cells = [kind, f"{8 * work.num_bytes / product.weights:.2f}"]
        for rows in ROWS:
            floor = max(work.num_bytes / read_rate, product.operations(rows) / rate)
            cells.append(f"{1e6 * seconds[kind, rows]:.0f} ({1e6 * floor:.0f})")
        lines.append(cells)
    columns = ["1 row", *(f"{rows} rows" for rows in ROWS[1:])]
    header = ("type", "bits a weight", *(f"{column}, µs (floor)" for column in columns))
    return (
        f"{product.inputs} x {product.outputs}, threads: {torch.get_num_threads()}; memory is read"
        f" at {read_rate / 1e9:.1f} GB/s, products in the caches run at {rate / 1e9:.0f} GOP/s"
        f"\n\n{markdown_table(header, lines)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = command_parser("bench.roofline.formats", __doc__)
    parser.add_argument("--inputs", type=int, default=2048, help="a multiple of 256")
    parser.add_argument("--outputs", type=int, default=65536)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args(argv)

    def measure() -> int:
        torch.set_num_threads(arguments.threads)
        args = WorkerArgs(quantization="gguf", attention_backend="native")
        print(measure_all(Product(arguments.inputs, arguments.outputs), args))
        return EXIT_OK

    return run_command("bench.roofline.formats", measure)


if __name__ == "__main__":
    sys.exit(main())
