"""Run the shapes example (`make quickstart TASK=shapes`): a tiny model learns to count the shapes in an image.

It takes minutes on two cores. Arguments are overrides of examples/shapes/grpo.yaml. Each stage is a separate
command, which is printed before it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.recipes.quickstart.run import Recipe, run_recipe

RECIPE = Recipe("examples.shapes.prepare", None, "examples/shapes/grpo.yaml", Path("outputs/shapes"))

if __name__ == "__main__":
    sys.exit(run_recipe(RECIPE, sys.argv[1:]))
