"""`python -m bench.simulate`."""

import sys

from bench.simulate.simulator import main

sys.exit(main())
