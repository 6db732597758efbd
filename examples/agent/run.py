"""Run the agent example (`make quickstart TASK=agent`): a tiny model learns to use a tool that may be busy.

It takes minutes on two cores. Arguments are overrides of examples/agent/grpo.yaml. Each stage is a separate
command, which is printed before it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.recipes.quickstart.run import Recipe, run_recipe

RECIPE = Recipe(
    "examples.agent.prepare", "examples/agent/sft.yaml", "examples/agent/grpo.yaml", Path("outputs/agent")
)

if __name__ == "__main__":
    sys.exit(run_recipe(RECIPE, sys.argv[1:]))
