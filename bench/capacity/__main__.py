"""`python -m bench.capacity`."""

import sys

from bench.capacity.command import main

sys.exit(main())
