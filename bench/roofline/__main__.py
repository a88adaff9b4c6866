"""`python -m bench.roofline`."""

import sys

from bench.roofline.command import main

sys.exit(main())
