"""Compare decode steps on a GPU, with and without CUDA graphs, with the bound by its memory.

    python -m bench.gpu.decode_floor --model gpt2 --load-format dummy
    python -m bench.gpu.decode_floor                      # SmolLM2-135M, built in

Takes the flags of a server. Prints, for batches of 1, 8, 64 and 256 rows with 128 and 1,000 tokens
of context: ms of a step as a graph, ms launched kernel by kernel, the floor (bytes of weights and
keys over the measured read speed, see bench/roofline/roofline_model.py), and graph over floor.
"""

import sys
from collections.abc import Sequence
from statistics import median

from bench.command import command_parser
from bench.roofline.model_work import work_of
from bench.roofline.roofline_model import Speed, floor
from bench.worker_steps import Row, WorkerBench
from quadriga.config import server_config as server_flags
from quadriga.config.server_config import ServerConfig
from quadriga.errors import QuadrigaError
from quadriga.model_files.resolve import resolve_model

BATCHES, CONTEXTS = (1, 8, 64, 256), (128, 1000)
NUM_STEPS, NUM_WARM_UP = 50, 5
READ_BYTES = 2**30
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line describes."""
    parser = command_parser("bench.gpu.decode_floor", __doc__)
    server_flags.add_flags(parser)
    try:
        report(server_flags.from_namespace(parser.parse_args(argv)))
    except QuadrigaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def report(config: ServerConfig) -> None:
    """Load the model twice, and print a line for each batch and context."""
    rows = max(BATCHES)
    config = config.replace(
        max_batch_size=rows,
        max_running_requests=rows,
        max_total_tokens=rows * 2 ** (max(CONTEXTS) + NUM_STEPS).bit_length(),
    )
    graphs = times_of(config)
    eager = times_of(config.replace(disable_cuda_graph=True))
    files = resolve_model(config.model)
    device, dtype, speed = describe(config)
    work = work_of(files.config, "none", NUMBER_BYTES[dtype])
    print(
        f"{config.model.shown_name} {dtype} on {device} · memory is read at {speed / 1e9:.0f} GB/s"
    )
    print(f"{'rows':>5}{'context':>9}{'graph ms':>10}{'eager ms':>10}{'floor ms':>10}{'ratio':>7}")
    for (batch, context), ms in graphs.items():
        rates = Speed(speed, dict.fromkeys(work.products, float("inf")))
        least = 1000 * sum(floor(work, (Row(context, 1),) * batch, rates).values())
        print(f"{batch:>5}{context:>9}{ms:>10.3f}{eager[batch, context]:>10.3f}{least:>10.3f}"
              f"{ms / least:>7.2f}")  # fmt: skip


def times_of(config: ServerConfig) -> dict[tuple[int, int], float]:
    """Return the median ms of a step by (rows, context), timed by the GPU."""
    from worker_proc.startup.build import make_runner

    runner = make_runner(config, resolve_model(config.model, show_progress=True))
    runner.warm_up()
    bench = WorkerBench(runner)
    times: dict[tuple[int, int], float] = {}
    for context in CONTEXTS:
        for batch in BATCHES:
            with bench.decoding(batch, context, NUM_STEPS + NUM_WARM_UP) as step:
                times[batch, context] = median(
                    [step() for _ in range(NUM_STEPS + NUM_WARM_UP)][NUM_WARM_UP:]
                )
    return times


def describe(config: ServerConfig) -> tuple[str, str, float]:
    """Return device, dtype, and bytes/s at which the device reads a large tensor."""
    from bench.gpu.read_speed import bytes_per_second
    from worker_proc.system.devices import choose_device, choose_dtype

    device = choose_device(config.worker.device)
    dtype = choose_dtype(config.worker.dtype, device)
    speed = bytes_per_second(device, READ_BYTES)
    return str(device), str(dtype).removeprefix("torch."), speed


if __name__ == "__main__":
    main()
