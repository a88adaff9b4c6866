"""Run the command `quadriga` as `python -m quadriga`."""

import sys

from quadriga.server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
