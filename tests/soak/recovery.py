"""Strike reinforcement learning runs with random faults: each must end bitwise like one that lost nothing.

    python -m tests.soak.recovery FOLDER                   # all runs: 65 faults and 39 pairs, about 45 min
    python -m tests.soak.recovery FOLDER ppo-pp2-ahead ... --seed 1

The driver, the engines and the reward functions are on node 0, the trained models on two other nodes, and
one node is spare. If all of them share devices, the reward functions are on a node of the models, too. Each
layout runs once without faults, and twice with them: five faults, one of each kind, in random phases, on
random ranks. Each run is a row of FOLDER/rows.jsonl; a row that exists is not run again.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from megarl.config.load import dump_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionLevel,
    DType,
    KLConfig,
    KLWhere,
    OnUpdate,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RecoveryConfig,
    RolloutCorrectionConfig,
    RolloutEngineKind,
    SGLangConfig,
    TrackingConfig,
)
from megarl.plan.placement.plan import plan_placement
from tests import fork_server
from tests.integration.run_outcome import Outcome
from tests.integration.tiny_run import Finished, save_inputs, save_policy, tiny_config
from tests.multinode.nodes import Network, Node, network
from tests.multinode.ray_nodes import RayNodes, ray_nodes
from tests.soak import out_of_memory
from tests.soak.watched_run import Moment, RankMoment, Wanted

STEPS = 10
RUNS = 3  # with faults, per cell
LIMIT_S = 45.0  # of a call whose usual duration is not known yet, after which a stopped rank counts as lost
_SGLANG_LIMIT_S = 150.0  # the same, and also the limit of its start
END_LIMIT_S = 240.0  # without a completed step, a run counts as hung
_STEPS_PER_FAULT = 3
_MOST_AGAIN_S = 2.0  # until another rank is killed; a recovery takes one to four seconds
_MOST_DELAY_S = 0.05  # from when a phase is seen to the fault
_UNDISTURBED_STEPS = 1  # completed after a rank was killed twice, before the next fault
_NUM_REPLICAS = 2  # so that the node of the engines needs more CPUs than two ranks, and gets no model
_TRAINERS = 2  # nodes with trained models
_LAYOUTS = {
    "tp2dp2": (ParallelConfig(tensor_parallel_size=2, data_parallel_size=2), [2, 2]),
    "pp2": (ParallelConfig(pipeline_parallel_size=2), [1, 1]),
    "ep2": (ParallelConfig(data_parallel_size=2, expert_parallel_size=2), [1, 1]),
}
_STALENESS = {"sync": 0, "ahead": 2, "shared": 0}
CELLS = [
    *(
        f"{name}-{layout}-{kind}"
        for name in ("ppo", "grpo")
        for layout in _LAYOUTS
        for kind in ("sync", "ahead")
    ),
    "ppo-pp2-shared",  # engines and models take turns on the same devices
]
_PHASES = (
    *("gen", "old_log_prob", "ref", "update_actor", "update_weights", "testing", "save_checkpoint"),
    *("begin_snapshot", "await_snapshot"),
)
_PHASES_OF_CRITIC = ("values", "update_critic")


def config_of(cell: str, inputs: Path, output_dir: Path) -> PPOConfig:
    """Configure the run of a cell. Its nodes are two with trained models, and one with the rest."""
    algorithm, layout, kind = cell.split("-")
    parallel, devices = _LAYOUTS[layout]
    is_ppo = algorithm == "ppo"
    correction = RolloutCorrectionConfig(
        level=CorrectionLevel.token if kind == "ahead" else CorrectionLevel.none
    )
    estimator = AdvantageEstimator.gae if is_ppo else AdvantageEstimator.grpo
    # The engine `hf` has no experts. SGLang is repeatable if it generates one sample after the other.
    has_experts = parallel.expert_parallel_size > 1
    of_engine = {
        "engine": RolloutEngineKind.sglang,
        "max_concurrency": 1,
        "sglang": SGLangConfig(server_args={"disable_radix_cache": True}),
    }
    roles = {"actor": "actor", "reference": "actor", **({"critic": "critic"} if is_ppo else {})}
    pools = dict.fromkeys(roles.values(), devices)
    if kind == "shared":
        roles = dict.fromkeys([*roles, "rollout"], "actor")
        pools = {"actor": devices}
    else:
        # Together they need more than a node of the models has, so that no rank is on the driver's node.
        roles |= dict.fromkeys(("rollout", "reward"), "engines")
        pools["engines"] = [0] * _TRAINERS + [_NUM_REPLICAS]
    return tiny_config(
        inputs,
        output_dir,
        model={"path": str(inputs / ("experts" if has_experts else "policy")), "dtype": DType.bfloat16},
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=estimator),
            kl=KLConfig(where=KLWhere.reward if is_ppo else KLWhere.loss),
            rollout_correction=correction,
        ),
        actor={"parallel": parallel},
        critic={"parallel": parallel},
        reward={"time_limit_s": 60},
        rollout={
            "n": 2,
            "num_replicas": _NUM_REPLICAS,
            "max_staleness": _STALENESS[kind],
            "on_update": OnUpdate.drain,
            **(of_engine if has_experts else {}),
        },
        placement=PlacementConfig(
            strategy=PlacementStrategy.custom,
            num_nodes=max(map(len, pools.values())),
            roles=roles,
            pools=pools,
        ),
        checkpoint=CheckpointConfig(every_steps=2, at_end=True),
        recovery=RecoveryConfig(enabled=True, max_restarts=20, hang_factor=10.0),
        trainer={
            "total_steps": STEPS,
            "prompts_per_step": 16,
            "updates_per_step": 2,
            "validate_every_steps": 2,
            "phase_time_limit_s": _SGLANG_LIMIT_S if has_experts else LIMIT_S,
        },
        tracking=TrackingConfig(loggers=["jsonl"], samples_every_steps=1),
    )


def num_cpus(config: PPOConfig) -> tuple[int, ...]:
    """Return the logical CPUs of each node: as many as its processes need, so that each has its place."""
    plan = plan_placement(config)
    needed = Counter[int]()
    for name, num_groups in plan.colocate_counts.items():
        counts = zip(plan.nodes[name], plan.process_on_nodes[name], strict=True)
        needed.update({node: count * num_groups for node, count in counts})
    trainers = max(needed[node] for node in range(_TRAINERS))
    return (needed[_TRAINERS], *[trainers] * (_TRAINERS + 1))


# ---- faults


class Victim(NamedTuple):
    """A rank of a model: its process as seen from outside, and its node."""

    rank: RankMoment
    process: psutil.Process
    node: Node

    @property
    def name(self) -> str:
        return f"{self.rank.process} rank {self.rank.rank}"

    def phase(self, moment: Moment) -> str:
        """Return the phase of the rank, or that of the driver."""
        own = [
            rank.phase for rank in moment.ranks if rank.pid == self.rank.pid and rank.node == self.rank.node
        ]
        return next(filter(None, own), moment.phase or "")

    def signal(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            self.process.send_signal(number)

    def exhaust_memory(self) -> None:
        out_of_memory.exhaust(self.process.pid)


def choose(
    ranks: Sequence[RankMoment], net: Network, spared: Collection[int], chance: random.Random
) -> Victim:
    """Choose a rank. Nodes in `spared` are not struck.

    Raises:
        IndexError: There is none.
        ProcessLookupError: It has just ended.
    """
    nodes = {node.address: node for node in net.nodes if node.number not in spared}
    rank = chance.choice([rank for rank in ranks if rank.node in nodes])
    return Victim(rank, nodes[rank.node].process(rank.pid), nodes[rank.node])


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        strike: Strikes a rank, or its whole node.
        takes_node: Whether the node is lost.
    """

    strike: Callable[[Victim], None]
    takes_node: bool = False


KINDS: Mapping[str, Kind] = {
    "kill -9": Kind(lambda victim: victim.signal(signal.SIGKILL)),
    "SIGSTOP": Kind(lambda victim: victim.signal(signal.SIGSTOP)),
    "out of memory": Kind(lambda victim: victim.exhaust_memory()),
    "link down": Kind(lambda victim: victim.node.link_down(), takes_node=True),
    "raylet": Kind(lambda victim: victim.node.kill_all("raylet"), takes_node=True),
}


class Planned(NamedTuple):
    """A fault of a run.

    Attributes:
        wanted: When it occurs.
        again_s: Seconds until another rank is killed, most likely during the recovery; None: none is.
    """

    kind: str
    wanted: Wanted
    again_s: float | None


def plan_faults(cell: str, number: int, seed: int) -> list[Planned]:
    """Choose the faults of a run.

    One spare node allows the loss of one node in each run, so there are two runs with one fault of each kind. The third
    loses more ranks while it recovers.
    """
    chance = random.Random(f"{seed} {cell}")
    of_processes = [name for name, kind in KINDS.items() if not kind.takes_node]
    of_nodes = [name for name, kind in KINDS.items() if kind.takes_node]
    chance.shuffle(of_processes)
    chance.shuffle(of_nodes)
    runs = [
        [*of_nodes[:1], *of_processes[:2]],
        [*of_nodes[1:], *of_processes[2:]],
        [*KINDS][:1] * 3,
    ]
    phases = _PHASES + (_PHASES_OF_CRITIC if cell.startswith("ppo") else ())
    planned = []
    for index, kinds in enumerate(runs):
        chance.shuffle(kinds)
        firsts = [2 + _STEPS_PER_FAULT * place for place in range(len(kinds))]
        planned.append(
            [
                Planned(
                    kind,
                    Wanted(chance.choice(phases), first, first + 1, chance.uniform(0, _MOST_DELAY_S)),
                    chance.uniform(0, _MOST_AGAIN_S) if index == 2 else None,
                )
                for kind, first in zip(kinds, firsts, strict=True)
            ]
        )
    return planned[number]


class Struck(NamedTuple):
    """A fault that has occurred.

    Attributes:
        kind: Its kind.
        victim: What was struck.
        step: The step during which it occurred.
        wanted: The phase that was waited for.
        phase: The phase of the struck rank, or that of the driver if the rank was idle.
        next_s: Seconds until the next step with a recovery was complete; None if the run has ended before, or
            two ranks were struck.
    """

    kind: str
    victim: str
    step: int | None
    wanted: str
    phase: str
    next_s: float | None


# ---- runs


class RunEndedError(Exception):
    """The run has ended before its last fault, or makes no progress."""


class Driver:
    """A run in progress."""

    def __init__(self, net: Network, ray: RayNodes, config: Path, log: Path) -> None:
        self._node = net.nodes[0]
        with log.open("w") as output:
            self._process = self._node.start(
                [*fork_server.PYTHON, "-m", "tests.soak.watched_run", str(config)],
                ray.environment,
                output,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        self._heard: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._pid = self._next()["pid"]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", "[")):  # the run prints messages, too
                self._heard.put(line)
        self._heard.put("")

    def _next(self) -> Any:
        end_s = time.monotonic() + END_LIMIT_S
        while time.monotonic() < end_s:
            # Processes of Ray may hold the run's output open after it has ended.
            has_ended = self._process.poll() is not None
            with suppress(queue.Empty):
                if line := self._heard.get(timeout=0 if has_ended else 0.5):
                    return json.loads(line)
            if has_ended:
                raise RunEndedError(f"ended with status {self._process.wait()}")
        raise self.stuck()

    def ranks(self, wanted: Wanted) -> list[RankMoment]:
        """Ask for a moment of the run, and return the ranks when its first step has begun.

        Raises:
            RunEndedError: The run ends or hangs before.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `_moment` says so
            self._process.stdin.write(json.dumps(wanted) + "\n")
            self._process.stdin.flush()
        return self._moment().ranks

    def reached(self) -> Moment:
        """Wait for the moment that was asked for. Raises like `ranks`."""
        return self._moment()

    def _moment(self) -> Moment:
        step, phase, ranks = self._next()
        return Moment(step, phase, [RankMoment(*rank) for rank in ranks])

    def wait(self, is_reached: Callable[[], bool]) -> float | None:
        """Return the seconds until a condition holds; None if the run has ended before.

        Raises:
            RunEndedError: It takes too long.
        """
        begin_s = time.monotonic()
        while not is_reached():
            if self._process.poll() is not None:
                return time.monotonic() - begin_s if is_reached() else None
            if time.monotonic() > begin_s + END_LIMIT_S:
                raise self.stuck()
            time.sleep(0.02)
        return time.monotonic() - begin_s

    def stuck(self) -> RunEndedError:
        """Write the stacks of the driver to its log."""
        self._node.process(self._pid).send_signal(signal.SIGUSR1)
        time.sleep(2)
        return RunEndedError(f"no progress within {END_LIMIT_S:g} s")

    def end(self) -> int:
        """Wait until the run ends by itself, and return its status."""
        self.wait(lambda: self._process.poll() is not None)
        return self._process.wait()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._node.process(self._pid).kill()
        self._process.wait()


def run(config: PPOConfig, faults: Sequence[Planned], folder: Path, chance: random.Random) -> list[Struck]:
    """Train in a new cluster, and strike. Returns the faults.

    Raises:
        RunEndedError: The run has failed, or hangs.
    """
    dump_config(config, folder / "run.yaml")
    cpus = num_cpus(config)
    struck: list[Struck] = []
    struck_nodes = set[int]()
    metrics = Path(config.trainer.output_dir) / "metrics.jsonl"
    with network(len(cpus), [folder.parent]) as net, ray_nodes(net, cpus, folder) as ray:
        driver = Driver(net, ray, folder / "run.yaml", folder / "driver.log")
        try:
            for index, fault in enumerate(faults):
                # A node with two losses is excluded, and would leave no spare one for a loss that follows.
                takes_node = any(KINDS[later.kind].takes_node for later in faults[index + 1 :])
                ranks = driver.ranks(fault.wanted)
                victim = choose(ranks, net, struck_nodes if takes_node else (), chance)
                struck_nodes.add(victim.node.number)
                kind = KINDS[fault.kind]
                before = num_recoveries(metrics)

                moment = driver.reached()
                kind.strike(victim)
                if fault.again_s is not None:
                    time.sleep(fault.again_s)
                    # There is no rank, it has just ended, or so has the run.
                    with suppress(ProcessLookupError, IndexError, RunEndedError):
                        ranks = driver.ranks(Wanted("", 0, -1, 0.0))
                        driver.reached()
                        choose(ranks, net, (), chance).signal(signal.SIGKILL)
                next_s = driver.wait(partial(_has_recovered, metrics, before))
                if fault.again_s is not None:
                    # The second may be a loss of its own, and time counts from the first.
                    next_s = None
                    driver.wait(partial(_has_steps, metrics, num_steps(metrics) + _UNDISTURBED_STEPS))
                struck.append(
                    Struck(
                        fault.kind if fault.again_s is None else f"{fault.kind} twice",
                        victim.node.name if kind.takes_node else victim.name,
                        moment.step,
                        fault.wanted.phase,
                        victim.phase(moment),
                        next_s,
                    )
                )
                print(" ", *struck[-1], flush=True)
            if status := driver.end():
                raise RunEndedError(f"ended with status {status}")
        finally:
            driver.kill()
    return struck


def num_steps(metrics: Path) -> int:
    """Return the number of completed steps."""
    return metrics.read_text().count("\n")


def _has_steps(metrics: Path, number: int) -> bool:
    return num_steps(metrics) >= number


def num_recoveries(metrics: Path) -> int:
    """Return the number of recoveries in completed steps."""
    lines = metrics.read_text().rpartition("\n")[0].splitlines()  # the last one may be incomplete
    return sum(round(json.loads(line).get("recovery/num_recoveries", 0.0)) for line in lines)


def _has_recovered(metrics: Path, before: int) -> bool:
    return num_recoveries(metrics) > before


def outcome_of(run: Path) -> Outcome:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return Outcome(Finished(run, [json.loads(line) for line in lines]))


class Row(NamedTuple):
    """A run with faults.

    Attributes:
        problem: Why it failed, or what differs from the undisturbed run; empty if nothing does.
    """

    cell: str
    number: int
    seed: int
    faults: list[Struck]
    problem: str
    num_recoveries: int
    seconds: float

    def describe(self) -> str:
        faults = "; ".join(
            f"{each.kind} of {each.victim} in step {each.step}, {each.phase}"
            + (f": {each.next_s:.0f} s" if each.next_s is not None else "")
            for each in map(Struck._make, self.faults)
        )
        equal = self.problem or "bitwise equal"
        return f"| {self.cell} | {faults} | {self.num_recoveries} | {equal} |"


def make_row(cell: str, number: int, seed: int, folder: Path) -> Row:
    """Run a cell without faults, unless that exists, and with them."""
    inputs = folder / cell
    undisturbed = inputs / "undisturbed"
    if not (undisturbed / "done").exists():
        shutil.rmtree(inputs, ignore_errors=True)
        undisturbed.mkdir(parents=True)
        save_inputs(inputs)
        save_policy(inputs / "experts", with_experts=True)
        run(config_of(cell, inputs, undisturbed / "run"), [], undisturbed, random.Random(0))
        (undisturbed / "done").touch()

    disturbed = inputs / f"run{number}-seed{seed}"
    shutil.rmtree(disturbed, ignore_errors=True)
    disturbed.mkdir()
    struck: list[Struck] = []
    begin_s = time.monotonic()
    faults = plan_faults(cell, number, seed)
    recoveries = 0
    try:
        struck = run(
            config_of(cell, inputs, disturbed / "run"),
            faults,
            disturbed,
            random.Random(f"{cell} {number} {seed}"),
        )
        found = outcome_of(disturbed / "run")
        problem = ", ".join(found.difference(outcome_of(undisturbed / "run")))
        recoveries = num_recoveries(disturbed / "run" / "metrics.jsonl")
    except RunEndedError as error:
        problem = str(error)
    return Row(cell, number, seed, struck, problem, recoveries, time.monotonic() - begin_s)


def summary(rows: Sequence[Row]) -> str:
    """Return a table of the kinds of faults: how many, in which phases, and the time to the next step."""
    struck = [Struck(*each) for row in rows for each in row.faults]
    lines = ["| fault | number | phases | next step after |", "|---|---|---|---|"]
    for kind in dict.fromkeys(each.kind for each in struck):
        of_kind = [each for each in struck if each.kind == kind]
        phases = ", ".join(sorted({each.phase for each in of_kind}))
        times = [each.next_s for each in of_kind if each.next_s is not None]
        seconds = f"{median(times):.0f} s, at most {max(times):.0f} s" if times else ""
        lines.append(f"| {kind} | {len(of_kind)} | {phases} | {seconds} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.recovery")
    parser.add_argument("folder", type=Path)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=", ".join(CELLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=RUNS, help="with faults, per cell")
    parsed = parser.parse_args()
    file = parsed.folder / "rows.jsonl"
    rows = [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    finished = {(row.cell, row.number, row.seed) for row in rows}
    with fork_server.server():
        for number in range(parsed.runs):
            for cell in parsed.cells or CELLS:
                if (cell, number, parsed.seed) not in finished:
                    rows.append(row := make_row(cell, number, parsed.seed, parsed.folder.absolute()))
                    print(row.describe(), flush=True)
                    with file.open("a") as output:
                        output.write(json.dumps(row._asdict()) + "\n")
    print(summary(rows))
    return 1 if any(row.problem for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
