"""Run four standard loads on a GPU, each with bench.serving and a server of its own.

    python -m bench.gpu.blocks --model gpt2                 # all, one after the other
    python -m bench.gpu.blocks --model gpt2 --only streams  # one of them
    python -m bench.gpu.blocks --dry-run                    # only print the commands

Unknown flags are passed on to bench.serving (`--load-format dummy`, `--tp 2`).
"""

import shlex
import subprocess
import sys

from bench.cli.command import command_parser

BLOCKS = {
    # 256 requests of 64 tokens at once, 64 wide
    "width": "--num-requests 256 --max-new-tokens 64 --max-batch-size 64"
    " --prefill-max-batch-size 16",
    # 256 requests of one token, prompts of some 260 tokens, 16 wide
    "prefill": "--num-requests 256 --max-new-tokens 1 --prompt-repeats 37 --unique-prompts"
    " --max-batch-size 16 --prefill-max-batch-size 16",
    # 64 requests of 128 tokens, one every 20 ms, text every 8 tokens
    "paced": "--num-requests 64 --max-new-tokens 128 --submit-interval-ms 20"
    " --submit-schedule absolute --max-batch-size 64 --pretok --stream-interval 8",
    # 256 streams at once, to see the worker's busy share
    "streams": "--num-requests 256 --max-new-tokens 512 --max-batch-size 256",
}


def main() -> None:
    """Run the loads of the command line."""
    parser = command_parser("bench.gpu.blocks", __doc__)
    parser.add_argument("--only", choices=BLOCKS, help="run one of the loads")
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    arguments, others = parser.parse_known_args()
    codes = []
    for name in [arguments.only] if arguments.only else BLOCKS:
        flags = [*BLOCKS[name].split(), "--no-stop-on-eos", "--device", arguments.device, *others]
        command = [sys.executable, "-m", "bench.serving", *flags]
        print(f"\n# {name}\n{shlex.join(command)}", flush=True)
        if not arguments.dry_run:
            codes.append(subprocess.run(command, check=False).returncode)
    sys.exit(max(codes, default=0))


if __name__ == "__main__":
    main()
