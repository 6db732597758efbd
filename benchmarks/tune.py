"""Run everything that judges predicted step times and the search, and print a summary.

python -m benchmarks.tune [--only published search_time ...]

counts       FLOPs, calls and bytes of the model against dry runs of every shipped run, within 1 % (up to hours)
published    published step times, each model predicted with constants of the others
layouts      24 random layouts on this machine's CPU, predicted and measured; needs an idle machine
brute_force  the search finds the optimum of all configurations of a small cluster
search_time  the time of a search for 128 to 10,000 devices
driver       the driver's own time at 64 to 4,096 ranks
"""

from __future__ import annotations

import argparse
import subprocess
import sys

PARTS = {
    "counts": ("pytest", "tests/soak/test_step_counts.py", "-s"),
    "published": ("benchmarks.tuning.published",),
    "layouts": ("benchmarks.tuning.layouts",),
    "brute_force": ("pytest", "tests/unit/plan/search/test_search.py", "-k", "brute_force"),
    "search_time": ("benchmarks.tuning.search_time",),
    "driver": ("benchmarks.tuning.driver",),
}


def main() -> int:
    """Run the parts, and return 1 if one of them exceeds its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    results = {}
    for name in parser.parse_args().only:
        print(f"\n== {name}", flush=True)
        results[name] = subprocess.run([sys.executable, "-m", *PARTS[name]], check=False).returncode

    print("\n== summary")
    for name, status in results.items():
        print(f"{name:12} {'within its limits' if status == 0 else 'FAILED'}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
