"""Measure the products of Llama 1B and 8B on a GPU, by every library that can compute them.

    python -m bench.gpu.products
    python -m bench.gpu.products --ways cublas humming-int4 --rows 1 64
    python -m bench.gpu.products --device cpu --tiny

A product multiplies `rows` rows of bfloat16 by a weight `[outputs, inputs]`. Weights rotate: the
graph that is timed multiplies by several of them, 512 MB in all, one after the other, so that none
is in the GPU's cache. A figure is the microseconds of one product in that graph, start of its
kernel included. The floor is the bytes of the weight at the measured read speed, or the operations
at the measured rate, whichever takes longer. Floors of quantized weights count their stored bytes.

| way | computed by |
|---|---|
| cublas, cublaslt | torch, with either library |
| gemv | our kernel for up to 64 rows, with the fastest of its tiles |
| gemv-early | the same, and each begins while the one before it runs |
| tinygemm | FlashInfer, up to 8 rows |
| fp8 | `torch._scaled_mm`, rows and weights in e4m3 with one scale each |
| humming-int4, humming-fp8 | humming-kernels, 4 bits in groups of 128, or e4m3 by column |

A way that a machine lacks, or whose result differs too much from float32, is left out with a line
that says why.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from bench.cli.command import command_parser, run_command
from bench.report.table import Value, add_json_flag, show

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from worker_proc.gpu.kernels.few_rows import FewRowsTile

ROTATED_BYTES = 512 * 2**20
ROWS = (1, 4, 8, 16, 64, 256)
# Of a result against float32: rounding of bfloat16, and of weights in fewer bits.
MAX_ERROR, MAX_QUANTIZED_ERROR = 0.02, 0.2
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "1b": {
        "qkv": (2048, 3072),
        "out": (2048, 2048),
        "gate_up": (2048, 16_384),
        "down": (8192, 2048),
        "head": (2048, 128_256),
    },
    "8b": {
        "qkv": (4096, 6144),
        "out": (4096, 4096),
        "gate_up": (4096, 28_672),
        "down": (14_336, 4096),
        "head": (4096, 128_256),
    },
}
TINY = {"tiny": {"qkv": (512, 384)}}

Call = Callable[[], "Tensor"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of a model.

    Attributes:
        name: of the model and of the product.
        inputs: numbers of an input row.
        outputs: numbers of an output row.
    """

    name: str
    inputs: int
    outputs: int

    def num_bytes(self, bits: float) -> float:
        """Return the bytes of a weight with `bits` for each number."""
        return self.inputs * self.outputs * bits / 8


class NotHere(Exception):
    """A way to multiply is not to be had for this shape or on this machine; says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the products of a command line, and return the exit code."""
    parser = command_parser("bench.gpu.products", __doc__)
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="one small shape, for a CPU")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--products", nargs="+", metavar="NAME", help="only these, such as down")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="N")
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.products", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    import torch

    from bench.gpu import ceilings
    from worker_proc.startup.devices import choose_device

    device = choose_device(arguments.device)
    tiny = arguments.tiny
    read = ceilings.read_bytes_per_second(device, 2**20 if tiny else 0)
    rate = ceilings.flops_per_second(device, 64 if tiny else 8192, torch.bfloat16)
    rows: list[dict[str, Value]] = []
    for shape in _shapes(arguments):
        by_rows: dict[int, dict[str, Value]] = {}
        for way in arguments.ways:
            for count, figures in _measure(way, shape, arguments.rows, device, read, rate, tiny):
                by_rows.setdefault(count, {"product": shape.name, "rows": count}).update(figures)
        rows += by_rows.values()
    title = f"products on {device}, us; memory {read / 1e9:.0f} GB/s, {rate / 1e12:.0f} TFLOP/s"
    show(title, rows, arguments.json)
    return 0


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    models = TINY if arguments.tiny else {name: MODELS[name] for name in arguments.models}
    return [
        Shape(f"{model} {name}", *sizes)
        for model, products in models.items()
        for name, sizes in products.items()
        if not arguments.products or name in arguments.products
    ]


def _measure(
    name: str,
    shape: Shape,
    rows: Sequence[int],
    device: "torch.device",
    read: float,
    rate: float,
    tiny: bool,
) -> Iterator[tuple[int, dict[str, Value]]]:
    """Yield the figures of one way for each number of rows that it takes."""
    import torch

    way = WAYS[name](shape, device)
    num_copies = 2 if tiny else max(1, round(ROTATED_BYTES / shape.num_bytes(way.bits)))
    try:
        weights = [
            way.prepared(_random(shape.outputs, shape.inputs, device)) for _ in range(num_copies)
        ]
    except Exception as error:  # of a library: the other ways and shapes go on
        print(f"{shape.name}, {name}: {_shown(error)}", file=sys.stderr)
        return
    for count in rows:
        try:
            seconds = _best_seconds(way, _random(count, shape.inputs, device), weights, device)
        except Exception as error:  # as above
            print(f"{shape.name}, {count} rows, {name}: {_shown(error)}", file=sys.stderr)
            continue
        operations = 2 * count * shape.inputs * shape.outputs
        figures: dict[str, Value] = {name: 1e6 * seconds}
        if way.floor_name:
            floor = max(shape.num_bytes(way.bits) / read, operations / rate)
            figures[way.floor_name] = 1e6 * floor
        yield count, figures
    del weights
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _shown(error: Exception) -> str:
    is_own = isinstance(error, NotHere)
    return str(error) if is_own else f"{type(error).__name__}: {str(error)[:200]}"


def _best_seconds(way: "Way", x: "Tensor", weights: Sequence[Any], device: "torch.device") -> float:
    """Return the seconds of a product by the fastest variant of a way.

    Raises:
        NotHere: no variant gave the right result; with the reason of the last one.
    """
    import torch

    found: list[float] = []
    reason: Exception = NotHere("has no variant for this shape")
    for multiply in way.variants(x):
        try:
            with torch.inference_mode():
                error = way.error_of(x, weights[0], multiply(x, weights[0]))
                if not error <= way.max_error:
                    raise NotHere(f"its result differs by {error:.3g} from float32")
                every = partial(_multiply_all, multiply, x, weights)
                found.append(_seconds(every, device))
        except Exception as error:  # of a library: its other variants go on
            reason = error
    if not found:
        raise reason
    return min(found) / len(weights)


def _multiply_all(multiply: "Multiply", x: "Tensor", weights: Sequence[Any]) -> "list[Tensor]":
    return [multiply(x, weight) for weight in weights]


def _seconds(call: Callable[[], object], device: "torch.device") -> float:
    """Return the seconds of a call; on a GPU, of its replay as a graph."""
    import torch

    from bench.gpu.ceilings import seconds_of

    if device.type != "cuda":
        return seconds_of(call, device, num_rounds=1)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    seconds = seconds_of(graph.replay, device)
    del kept, graph
    return seconds


def _random(rows: int, columns: int, device: "torch.device") -> "Tensor":
    import torch

    values: Tensor = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
    return values.div_(columns**0.25)


Multiply = Callable[["Tensor", Any], "Tensor"]


class Way:
    """A library's product.

    Attributes:
        bits: stored for each number of a weight, scales included.
        max_error: relative difference from float32 up to which a result is right.
        floor_name: the column of the floor with these bits; "": another way has it.
    """

    bits: float = 16
    max_error = MAX_ERROR
    floor_name = ""

    def __init__(self, shape: Shape, device: "torch.device") -> None:
        self._shape, self._device = shape, device
        self._originals: dict[int, Tensor] = {}

    def prepared(self, weight: "Tensor") -> Any:
        """Return a weight `[outputs, inputs]` as the library wants it, or raise NotHere."""
        return weight

    def variants(self, x: "Tensor") -> Iterator[Multiply]:
        """Yield the functions that multiply rows by a prepared weight, or raise NotHere."""
        raise NotImplementedError

    def error_of(self, x: "Tensor", weight: Any, result: "Tensor") -> float:
        """Return the relative difference of a result from the float32 product."""
        original = self._originals.get(id(weight), weight)
        exact = x.float() @ original.float().T
        return float((result.float() - exact).norm() / exact.norm())

    def keep_first(self, prepared: Any, weight: "Tensor") -> Any:
        """Keep the weight from which the first prepared one was made, for `error_of`."""
        if not self._originals:
            self._originals[id(prepared)] = weight
        return prepared


class TorchProduct(Way):
    """torch's linear, with the library that `preferred` names."""

    preferred = "cublas"
    floor_name = "floor"

    def variants(self, x: "Tensor") -> Iterator[Multiply]:
        import torch.nn.functional as F

        with self._library():
            yield F.linear

    @contextmanager
    def _library(self) -> Iterator[None]:
        import torch

        if self._device.type != "cuda":
            if self.preferred != "cublas":
                raise NotHere("needs a GPU")
            yield
            return
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(self.preferred)
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)


class LtProduct(TorchProduct):
    """torch's linear by cuBLASLt."""

    preferred = "cublaslt"
    floor_name = ""


class FewRowsProduct(Way):
    """Our kernel for few rows, with each of its tiles.

    Attributes:
        begins_early: see `multiply_few`.
    """

    begins_early = False

    def variants(self, x: "Tensor") -> Iterator[Multiply]:
        from worker_proc.gpu.kernels.few_rows import MAX_ROWS, multiply_few, new_arrivals, tiles_of
        from worker_proc.gpu.products import num_programs

        if len(x) > MAX_ROWS:
            raise NotHere(f"takes up to {MAX_ROWS} rows")
        arrivals, programs = new_arrivals(x.device), num_programs(x.device)
        for tile in tiles_of(len(x), is_gated=False):

            def multiply(x: "Tensor", weight: "Tensor", tile: "FewRowsTile" = tile) -> "Tensor":
                return multiply_few(
                    x, weight, None, tile, programs, arrivals, begins_early=self.begins_early
                )

            yield multiply


class EarlyFewRowsProduct(FewRowsProduct):
    """The kernel that begins while the one before it runs."""

    begins_early = True

    def prepared(self, weight: "Tensor") -> Any:
        from worker_proc.gpu.kernels.early import can_begin_early

        if not can_begin_early(self._device):
            raise NotHere("needs a GPU of compute capability 9.0")
        return weight


class ScaledProduct(Way):
    """torch's product of e4m3 rows and weights."""

    bits = 8
    max_error = MAX_QUANTIZED_ERROR

    def prepared(self, weight: "Tensor") -> Any:
        import torch

        if self._device.type != "cuda":
            raise NotHere("needs a GPU of compute capability 8.9")
        return self.keep_first(weight.to(torch.float8_e4m3fn), weight)

    def variants(self, x: "Tensor") -> Iterator[Multiply]:
        import torch

        one = torch.ones((), device=x.device)
        coded = x.to(torch.float8_e4m3fn)

        def multiply(_: "Tensor", weight: "Tensor") -> "Tensor":
            product: Tensor = torch._scaled_mm(
                coded, weight.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
            return product

        yield multiply


class TinyProduct(Way):
    """FlashInfer's product for few rows."""

    def prepared(self, weight: "Tensor") -> Any:
        try:
            from flashinfer.gemm import tinygemm_bf16  # noqa: F401
        except ImportError as error:
            raise NotHere(f"flashinfer is not installed ({error})") from None
        return weight

    def variants(self, x: "Tensor") -> Iterator[Multiply]:
        import torch
        from flashinfer.gemm import tinygemm_bf16

        if len(x) > 8:
            raise NotHere("takes up to 8 rows")

        def multiply(x: "Tensor", weight: "Tensor") -> "Tensor":
            out = torch.empty(len(x), len(weight), device=x.device, dtype=x.dtype)
            tinygemm_bf16(x, weight, out)
            return out

        yield multiply


class HummingProduct(Way):
    """The product of humming-kernels with 4-bit weights in groups of 128."""

    bits = 4 + 16 / 128
    max_error = MAX_QUANTIZED_ERROR
    floor_name = "floor int4"
    config: ClassVar[dict[str, object]] = {"dtype": "uint4", "group_size": 128}

    def prepared(self, weight: "Tensor") -> Any:
        import torch

        if self._device.type != "cuda":
            raise NotHere("needs a GPU")
        if "head" in self._shape.name:
            raise NotHere("heads are rarely quantized")
        try:
            from humming.layer import HummingLayer
        except ImportError as error:
            raise NotHere(f"humming-kernels is not installed ({error})") from None
        layer = HummingLayer(
            shape_n=self._shape.outputs,
            shape_k=self._shape.inputs,
            weight_config=dict(self.config),
            torch_dtype=torch.bfloat16,
        ).cuda()
        layer.load_from_unquantized(weight)
        layer.transform()
        return self.keep_first(layer, weight)

    def variants(self, x: "Tensor") -> Iterator[Multiply]:
        yield lambda x, layer: layer(x)


class HummingFP8Product(HummingProduct):
    """The product of humming-kernels with e4m3 weights and a scale for each column."""

    bits = 8
    floor_name = "floor fp8"
    config: ClassVar[dict[str, object]] = {"dtype": "float8e4m3"}


WAYS: dict[str, type[Way]] = {
    "cublas": TorchProduct,
    "cublaslt": LtProduct,
    "gemv": FewRowsProduct,
    "gemv-early": EarlyFewRowsProduct,
    "tinygemm": TinyProduct,
    "fp8": ScaledProduct,
    "humming-int4": HummingProduct,
    "humming-fp8": HummingFP8Product,
}


if __name__ == "__main__":
    sys.exit(main())
