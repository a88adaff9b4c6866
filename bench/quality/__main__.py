"""`python -m bench.quality`."""

import sys

from bench.quality.command import main

sys.exit(main())
