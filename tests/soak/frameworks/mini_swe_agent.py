"""mini-swe-agent, whose only tool is a shell. The price list is a command."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would download its table of costs

from minisweagent.agents.default import DefaultAgent  # pyrefly: ignore[missing-import]
from minisweagent.environments.local import LocalEnvironment  # pyrefly: ignore[missing-import]
from minisweagent.models.litellm_model import LitellmModel  # pyrefly: ignore[missing-import]
from price_list import PriceList, print_reward, read_task  # pyrefly: ignore[missing-import]

COMMAND = """#!/bin/sh
if [ -e busy ]; then rm busy; echo busy; else sed -n "s/^$1 //p" prices; fi
"""


def main() -> None:
    item, truth, extra = read_task()
    prices = PriceList(extra["list"], extra["busy"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items = ("".join(letters) for letters in itertools.product("abcdefgh", repeat=2))
        (folder / "prices").write_text("".join(f"{each} {prices.price_of(each)}\n" for each in items))
        (folder / "price").write_text(COMMAND)
        (folder / "price").chmod(0o700)
        if extra["busy"]:
            (folder / "busy").touch()

        path = {"PATH": f"{folder}:{os.environ['PATH']}"}
        agent = DefaultAgent(
            LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors"),
            LocalEnvironment(cwd=name, env=path, timeout=10),
            system_template="Find the price of an item with the command `price`.",
            instance_template="{{task}}",
            step_limit=4,
        )
        print_reward(agent.run(item).get("submission", "").strip() == truth)


if __name__ == "__main__":
    main()
