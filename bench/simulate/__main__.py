"""`python -m bench.simulate`."""

import sys

from bench.simulate.command import main

sys.exit(main())
