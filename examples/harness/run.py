"""Run the harness example (`make quickstart TASK=harness`): agent.py is trained through the endpoint.

It takes minutes on two cores. Arguments are overrides of examples/harness/grpo.yaml. Each stage is a separate
command, which is printed before it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.recipes.quickstart.run import Recipe, run_recipe

RECIPE = Recipe(
    "examples.agent.prepare",
    "examples/harness/sft.yaml",
    "examples/harness/grpo.yaml",
    Path("outputs/harness"),
)

if __name__ == "__main__":
    sys.exit(run_recipe(RECIPE, sys.argv[1:]))
