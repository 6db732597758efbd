"""Kill a run and resume it: after `kill -9` at any moment, a complete checkpoint is left to resume from.

    python -m examples.resume sft configs/quickstart_sft.yaml trainer.total_steps=40

The command starts `megarl train` with a checkpoint every 2 steps, kills it after the first checkpoint, and runs
the same command again until the run is complete. Use `train` instead of `sft` for PPO.
"""

from __future__ import annotations

import subprocess
import sys
import time

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig, SFTConfig

EVERY_STEPS = 2


def main(command: str, config_path: str, overrides: list[str]) -> int:
    """Return the exit status of the second run."""
    overrides = [*overrides, f"checkpoint.every_steps={EVERY_STEPS}"]
    kind: type[PPOConfig | SFTConfig] = PPOConfig if command == "train" else SFTConfig
    config = load_config(kind, config_path, overrides)
    latest = config.checkpoint_path / "latest"  # a file that names the newest complete checkpoint
    run = [sys.executable, "-m", "megarl", "train", config_path, *overrides]
    first = subprocess.Popen(run)
    while not latest.exists() and first.poll() is None:
        time.sleep(0.1)

    if first.poll() is not None:
        print("it ended before it could be killed; give it more steps", file=sys.stderr)
        return first.returncode or 1

    first.kill()  # only the driver; all processes that it started end with it
    first.wait()
    print(f"killed; the newest checkpoint is {latest.read_text().strip()}", flush=True)

    return subprocess.run(run, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
