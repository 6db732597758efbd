"""`python -m megarl` is the command `megarl`."""

import sys

from megarl.cli.main import main

sys.exit(main())
