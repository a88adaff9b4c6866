"""`python -m bench.simulate.what_if`."""

import sys

from bench.simulate.what_if.command import main

if __name__ == "__main__":
    sys.exit(main())
