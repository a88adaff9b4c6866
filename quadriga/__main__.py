"""The command line: `quadriga serve …` and `quadriga ask "…"`."""

import argparse
import sys

from quadriga.client import Client
from quadriga.config import DEFAULT_ENDPOINT
from quadriga.errors import QuadrigaError
from quadriga.sampling import SamplingParams


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        import launcher

        launcher.main(sys.argv[2:])
    parser = argparse.ArgumentParser("quadriga", epilog="quadriga serve [FLAGS] starts a server.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="start a server; see quadriga serve --help")
    ask = commands.add_parser("ask", help="ask a running server, and print the answer as it comes")
    ask.add_argument("prompt", nargs="+")
    ask.add_argument("--endpoint", default=DEFAULT_ENDPOINT)
    ask.add_argument("--plain", action="store_true", help="continue the text; no chat template")
    ask.add_argument("--max-new-tokens", type=int)
    ask.add_argument("--temperature", type=float, default=0.0)
    ask.add_argument("--seed", type=int)
    sys.exit(_ask(parser.parse_args()))


def _ask(arguments: argparse.Namespace) -> int:
    text = " ".join(arguments.prompt)
    prompt = text if arguments.plain else [{"role": "user", "content": text}]
    params = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    try:
        with Client(arguments.endpoint) as client:
            for chunk in client.stream(prompt, params):
                print(chunk.text, end="", flush=True)
        print()
    except QuadrigaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    return 0


if __name__ == "__main__":
    main()
