"""Run the command `megarl` as `python -m megarl`."""

import sys

from megarl.cli.main import main

sys.exit(main())
