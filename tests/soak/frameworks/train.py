"""Train agents of four frameworks and of Anthropic's SDK, unmodified, through the endpoint:
`python -m tests.soak.frameworks.train VENV/bin/python [PROGRAM ...]`.

VENV has smolagents, pydantic-ai-slim[openai], mini-swe-agent, langgraph, langchain-openai and anthropic. The
task is the price list of examples/agent. A tiny model imitates teachers that play it with the framework, and
is right about half of the time; then GRPO trains it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from examples.agent import prepare
from megarl.config.schema import HarnessConfig
from tests.docs.pages import ROOT
from tests.soak.frameworks.demonstrations import fine_tune, record
from tests.soak.frameworks.formats import FORMATS, MAX_TOKENS, save_model

_START = Path(__file__).with_name("start.py")
_IGNORED = ["temperature", "top_p", "top_k", "seed", "tool_choice", "parallel_tool_calls"]
_LEAST_SCORE = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", type=Path, help="the Python of the frameworks")
    parser.add_argument("programs", nargs="*", default=list(FORMATS), help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--demonstrations", type=int, default=300)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()

    print("| program | s per episode | before | after | minutes |\n|---|---|---|---|---|", flush=True)
    scores = []
    with tempfile.TemporaryDirectory() as temporary:
        for program in arguments.programs:
            folder = (arguments.folder or Path(temporary)).absolute() / program
            with _served(arguments.python, program, folder) as command:
                scores.append(_learn(program, command, folder, arguments.demonstrations, arguments.steps))
    return int(min(scores) < _LEAST_SCORE)


@contextmanager
def _served(python: Path, program: str, folder: Path) -> Generator[list[str]]:
    """Start the server of a program, and return the command that runs the program."""
    folder.mkdir(parents=True)
    # The address of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="megarl-") as short:
        address = Path(short) / "start"
        server = subprocess.Popen([python, _START, "serve", address, program])
        try:
            while not address.exists():
                if server.poll() is not None:
                    raise SystemExit(f"{program} cannot be imported by {python}; see its output above")
                time.sleep(0.05)
            yield [sys.executable, "-S", "-E", str(_START), "run", str(address)]
        finally:
            server.kill()
            server.wait()


def _learn(program: str, command: list[str], folder: Path, num_demonstrations: int, steps: int) -> float:
    """Train the model of a program, print a row of the table, and return the last score."""
    tokenizer = save_model(folder / "model", 0)
    harness = HarnessConfig(command=command, ignored_parameters=_IGNORED, time_limit_s=120)
    teachers = random.Random(0).choices(prepare.TEACHERS, k=num_demonstrations)

    started_s = time.monotonic()
    shown = record(harness, tokenizer, FORMATS[program], teachers)
    per_episode_s = (time.monotonic() - started_s) / num_demonstrations
    # The first proof: programs play every episode to its end, and reward the teacher who is right.
    for each in shown:
        rewards = each.ended.trajectory.turn_rewards
        if each.ended.why or (each.teacher == "right" and rewards[-1:] != [1.0]):
            raise SystemExit(f"{program}: an episode failed: {each.ended.why or rewards}")
    rows = [row for each in shown for row in each.ended.trajectory.rows]
    print(f"{program}: {len(rows)} rows of {len(shown)} episodes", file=sys.stderr, flush=True)
    fine_tune(folder / "model", rows, 300)

    prepare.prepare(folder / "task", 0)
    started_s = time.monotonic()
    _train(folder, command, steps)
    summary = json.loads((folder / "run" / "summary.json").read_text())["validation"]
    minutes = (time.monotonic() - started_s) / 60
    print(
        f"| {program} | {per_episode_s:.2f} | {summary['before']:.3f} | {summary['after']:.3f} | {minutes:.1f} |",
        flush=True,
    )
    return float(summary["after"])


def _train(folder: Path, command: list[str], steps: int) -> None:
    data = folder / "task" / "data"
    overrides = [
        f"model.path={folder / 'model'}",
        f"data.train_files=[{data / 'train.jsonl'}]",
        f"data.val_files=[{data / 'validation.jsonl'}]",
        f"data.max_response_length={MAX_TOKENS - 6}",
        "agent.harness.function=null",
        f"agent.harness.command={json.dumps(command)}",
        f"agent.harness.ignored_parameters={json.dumps(_IGNORED)}",
        "agent.max_turn_tokens=10",
        "rollout.max_concurrency=32",
        "rollout.validation.n=2",
        f"trainer.total_steps={steps}",
        f"trainer.validate_every_steps={steps}",
        "checkpoint.at_end=false",
        f"trainer.output_dir={folder / 'run'}",
    ]
    subprocess.run(
        [sys.executable, "-m", "megarl", "train", "examples/harness/grpo.yaml", *overrides],
        cwd=ROOT,
        check=True,
        stdout=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
