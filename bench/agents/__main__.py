"""Agents of several turns beside other prompts: `python -m bench.agents`.

    python -m bench.agents simulate --agents 8 --turns 40
    python -m bench.agents replay "ours: --max-total-tokens 65536" --peer llama-cpp

Other prompts fill the KV pool while agents wait for their tools. Each turn's prompt is that of the
turn before, its answer, and new text. `--sessions FILE` takes recorded sessions, of --record or of
lucebench, cut at --last-prompt; else they are drawn.

`simulate` runs the real scheduler in virtual time; flags of the server follow `--`. `replay` starts
each server with an empty cache, lets the agents run, and reports the prompt tokens that turns
computed against those that were sent and those that were new, and the time to the first token.
Each of our servers runs without and with hints for the cache. With --json FILE a run that is in the
file is not made again, so that a command that was interrupted goes on.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.agents.live import replay
from bench.agents.simulated import simulate
from bench.cli.command import command_parser, run_command, run_until_signal
from bench.client.server import config_of
from bench.turns import VARIANTS_HELP, split_common
from simulator import cost_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code."""
    own, server = split_common(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        flags = _parser().parse_args(own)
        if flags.command == "simulate":
            return simulate(flags, config_of(server))
        if flags.logs is None:
            flags.logs = Path(tempfile.mkdtemp(prefix="bench-agents-"))
        return run_until_signal(replay(flags, server))

    return run_command("bench.agents", run)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("bench.agents", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    simulated = commands.add_parser("simulate", help="in virtual time")
    live = commands.add_parser("replay", help="on servers")
    for one in (simulated, live):
        add = one.add_argument
        add("--sessions", type=Path, help="recorded sessions, in place of drawn ones")
        add("--agents", type=int, default=8)
        add("--turns", type=int, default=40, help="of each agent")
        add("--shared", type=int, default=1024, help="tokens with which all begin")
        add("--first-prompt", type=int, default=2048, help="tokens of a first turn")
        add("--last-prompt", type=int, default=8000, help="tokens of a last turn")
        add("--answer", type=int, default=48, help="tokens of every answer")
        add("--think-s", type=float, default=120.0, help="mean time between turns")
        add("--load-rate", type=float, default=0.3, help="other requests a second")
        add("--load-prompt", type=int, default=1500, help="mean tokens of them")
        add("--seed", type=int, default=0)
    add = simulated.add_argument
    add("--keep-s", type=float, default=3600.0, help="of turns with hints")
    add("--pool-tokens", type=int, default=131_072)
    add("--cost-model", type=Path, default=cost_model.DEFAULT)
    add = live.add_argument
    add("variants", nargs="*", default=[], metavar="VARIANT", help=VARIANTS_HELP)
    add("--keep-alive", default="1h", help="of turns with hints")
    add("--peer", action="append", default=[], help="a server of bench.peers")
    add("--peer-flags", default="", metavar="FLAGS", help="further flags of the peers")
    add("--url", default="", help="measure a server that runs, without hints and with them")
    add("--model", default="smollm2-135m", help="name of the model at --url")
    add("--repeat", type=int, default=1, help="turns of each server")
    add("--json", type=Path, metavar="FILE", help="append the runs to a file")
    add("--logs", type=Path, metavar="DIRECTORY", help="of the servers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
