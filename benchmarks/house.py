"""What the house measures: lines, files and classes of megarl by package, and the modules that one PPO step passes through.

    python benchmarks/house.py                  # of this checkout
    python benchmarks/house.py --tree FOLDER    # of another, of any age

The step is a real one: `megarl train` with actor, reference, critic, reward function and one engine of the kind hf, on a model of four
layers. In each process every function call of the second `train_step` is looked at; a module counts once, in whichever process it works.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Python runs a `sitecustomize` of its path in every process that starts. Ray calls its actors' methods in threads of its own, which no
# other hook reaches: so what executes a call in a worker begins to be watched there.
_WATCH = """
import os, sys, threading, time
_TREE, _FOLDER = os.path.join(os.environ["WATCHED_TREE"], "megarl", ""), os.environ["WATCHED_FOLDER"]
_OPEN, _known = os.path.join(_FOLDER, "open"), {}

def _look(frame, event, argument):
    if event not in ("call", "return"):
        return
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if name == "train_step" and file.endswith("/trainers/ppo.py"):
        if event == "return":
            os.path.exists(_OPEN) and os.remove(_OPEN)
        elif frame.f_locals["step"] == 2:
            open(_OPEN, "w").close()
    if file in _known:
        return
    if not file.startswith(_TREE):
        _known[file] = True
    elif os.path.exists(_OPEN):
        _known[file] = True
        with open(os.path.join(_FOLDER, "passed"), "a") as passed:
            passed.write("megarl/" + file[len(_TREE) :] + "\\n")

def _watch_worker():
    while (host := getattr(sys.modules.get("megarl.controller.host"), "WorkerHost", None)) is None:
        time.sleep(0.01)
    inner = host.execute
    def execute(self, *arguments):
        sys.setprofile(_look)
        return inner(self, *arguments)
    host.execute = execute

sys.setprofile(_look)
threading.setprofile(_look)
threading.Thread(target=_watch_worker, daemon=True).start()
"""

_CONFIG = """
algorithm: {{kl: {{where: reward}}}}
model: {{path: {folder}/policy, dtype: float32}}
data: {{train_files: [{folder}/train.parquet], max_prompt_length: 8, max_response_length: 8}}
rollout: {{engine: hf, n: 2, max_concurrency: 64}}
resharding: {{bucket_mb: 1}}
reward: {{functions: [{{path: {folder}/reward.py, name: compute_score}}], num_processes: 1}}
trainer: {{total_steps: 2, prompts_per_step: 4, output_dir: {folder}/run}}
tracking: {{loggers: [jsonl]}}
device: cpu
"""


def measure_files(tree: Path) -> tuple[dict[str, Counter], int]:
    """Files, lines and classes by package, and how many public class names stand in more than one file."""
    packages: dict[str, Counter] = {}
    homes: Counter = Counter()
    for file in sorted((tree / "megarl").rglob("*.py")):
        if "stand_ins" in file.parts:
            continue
        text = file.read_text(encoding="utf-8")
        package = file.relative_to(tree / "megarl").parts[0] if file.parent != tree / "megarl" else "(top)"
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
        homes.update({node.name for node in classes if not node.name.startswith("_")})
        packages.setdefault(package, Counter()).update(files=bool(text.strip()), lines=text.count("\n"), classes=len(classes))
    return packages, sum(count > 1 for count in homes.values())


def modules_of_a_step(tree: Path) -> list[str]:
    """Of megarl, as paths below the checkout. Raises CalledProcessError where the run fails."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "hook").mkdir()
        (folder / "config.yaml").write_text(_CONFIG.format(folder=folder))
        plain = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        make_inputs = f"from pathlib import Path; from tests.integration.tiny_run import save_inputs; save_inputs(Path({str(folder)!r}))"
        subprocess.run([sys.executable, "-c", make_inputs], cwd=tree, env=plain, check=True)
        (folder / "hook" / "sitecustomize.py").write_text(_WATCH)
        watched = {**plain, "PYTHONPATH": f"{folder / 'hook'}:{tree}", "WATCHED_TREE": str(tree), "WATCHED_FOLDER": str(folder)}
        run = [sys.executable, "-m", "megarl", "train", str(folder / "config.yaml")]
        subprocess.run(run, cwd=tree, env=watched, check=True, stdout=sys.stderr)
        return sorted(set((folder / "passed").read_text().splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--names", action="store_true", help="also the names of the modules that a step passes")
    parsed = parser.parse_args()
    tree, console = parsed.tree.resolve(), Console()
    packages, doubled = measure_files(tree)
    table = Table("package", "files", "lines", "classes", title="megarl", title_justify="left")
    total: Counter = Counter()
    for name, counts in packages.items():
        table.add_row(name, *(str(counts[key]) for key in ("files", "lines", "classes")))
        total.update(counts)
    table.add_section()
    table.add_row("all", *(f"{total[key]:,}" for key in ("files", "lines", "classes")))
    console.print(table)
    console.print(f"public class names that stand in more than one file: {doubled}")
    modules = modules_of_a_step(tree)
    console.print(f"modules that one PPO step passes: {len(modules)}", highlight=False)
    if parsed.names:
        console.print("\n".join(modules), highlight=False)


if __name__ == "__main__":
    main()
