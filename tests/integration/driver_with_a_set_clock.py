"""Run `megarl` with a wall clock that jumps by hours, back and forth: python driver_with_a_set_clock.py
ARGUMENTS"""

import itertools
import sys
import time

from megarl.cli.main import main

if __name__ == "__main__":
    of_day = time.time
    looks = itertools.count()
    time.time = lambda: of_day() + 3600 * (next(looks) // 100 % 3 - 1)
    sys.exit(main(sys.argv[1:]))
