"""Placements as a user sees them.

`megarl check` refuses impossible ones with a reason and a hint, and `megarl check --plan` shows valid ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.shipped import CONFIGS_DIR
from tests.unit.config.folders import ppo_values, write_yaml

# The run: an actor of 4 devices in pairs, a critic of 2, one engine.
ROLES = "placement.roles={actor: one, reference: one, critic: two, rollout: two}"
CUSTOM = ["placement.strategy=custom", ROLES]

IMPOSSIBLE = [
    (
        ["placement.devices_per_node=2"],
        "1 x 2 = 2 devices, but the roles need 7",
        "use devices_per_node 7 or more, more nodes",
    ),
    (
        ["placement.num_nodes=8", "placement.devices_per_node=1"],
        "a tensor-parallel group must fit on one node",
        "use devices_per_node 2 or more",
    ),
    (
        ["placement.strategy=hybrid", "rollout.num_replicas=5"],
        "the engines share the actor's 4",
        "use num_replicas 4 or fewer, a larger actor layout, or the placement split_collocate",
    ),
    (
        ["placement.strategy=stand_alone", "placement.devices_per_node=8"],
        "the roles need 11",
        "use devices_per_node 11 or more",
    ),
    (
        ["placement.strategy=custom", "placement.pools={one: [4]}"],
        "the role 'actor' has no pool",
        "as placement.roles.actor=one",
    ),
    (
        [*CUSTOM, "placement.pools={one: [4], two: [2]}", "placement.roles.judge=one"],
        "this run has no role 'judge'",
        "it has actor, reference",
    ),
    (
        [*CUSTOM, "placement.pools={one: [4]}"],
        "there is no pool 'two'",
        "such as placement.pools.two=[4]",
    ),
    (
        [*CUSTOM, "placement.pools={one: [4], two: [2], three: [1]}"],
        "placement.pools.three: no role runs in it",
        "map a role to it",
    ),
    (
        [*CUSTOM, "placement.pools={one: [2], two: [2]}"],
        "has 2 devices, but actor needs 4",
        "use 4 or more, or smaller sizes of actor",
    ),
    (
        [*CUSTOM, "placement.num_nodes=2", "placement.pools={one: [3, 1], two: [2]}"],
        "actor needs 4 devices in groups of 2, each on one node",
        "use a multiple of 2 on each node",
    ),
    (
        [*CUSTOM, "placement.devices_per_node=4", "placement.pools={one: [4], two: [2]}"],
        "on node 0 the pools have 6 devices (one 4, two 2), but devices_per_node is 4",
        "use smaller pools there, another node",
    ),
    (
        [*CUSTOM, "placement.pools={one: [4], two: [0, 2]}"],
        "names 2 nodes, but num_nodes is 1",
        "use 2 nodes",
    ),
    (
        ["placement.pools={one: [4]}"],
        "has no effect with placement.strategy=split_collocate",
        "set placement.strategy=custom",
    ),
    (
        ["placement.strategy=hybrid", "resharding.transport=group"],
        "NCCL does not allow a group with two members on one device",
        "use device or folder, or auto",
    ),
    (
        ["placement.strategy=fully_collocate", "placement.device_memory_gb=0.001", "device=cpu"],
        "(pool all) needs 1.61 MiB (actor 0.10, reference 0.00, critic 1.51), but has 1.024",
        "or start anyway with placement.over_budget=warn",
    ),
]


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    return write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))


@pytest.mark.parametrize(("overrides", "reason", "hint"), IMPOSSIBLE)
def test_an_impossible_placement_is_refused(
    overrides: list[str], reason: str, hint: str, ppo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--fast", ppo, *overrides]) == 2
    error = capsys.readouterr().err
    line = next(line for line in error.splitlines() if reason in line)
    assert hint in line


def test_only_an_engine_may_span_nodes(ppo: str) -> None:
    """An engine of four devices on nodes of three has two on each of two nodes."""
    nodes = ["placement.num_nodes=2", "placement.devices_per_node=3"]
    engine = ["rollout.engine=sglang", "rollout.tensor_parallel_size=4"]
    assert main(["check", "--fast", ppo, "placement.strategy=fully_collocate", *engine, *nodes]) == 0


def test_a_placement_over_its_budget_can_be_allowed(ppo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["check", "--fast", ppo, "placement.device_memory_gb=0.001", "placement.over_budget=warn"]) == 0
    )
    assert (
        "warning: placement.device_memory_gb: in ref, device 0 of node 0 (pool actor) needs"
        in capsys.readouterr().out
    )


def rows_of(text: str) -> list[str]:
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_a_plan_is_printed_and_drawn(
    name: str, ppo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    drawing = tmp_path / name
    command = ["check", "--plan", ppo, "placement.strategy=hybrid", "--output", str(drawing)]
    assert main(command) == 0
    rows = rows_of(capsys.readouterr().out)
    assert "actor actor 0-3 actor + reference 0 0-3" in rows
    assert "actor rollout 0 rollout 0 0" in rows
    assert "time sharing: actor and rollout" in rows
    assert "transport device resharding.transport=auto" in rows
    assert any("update_critic | update_actor" in row for row in rows)
    assert f"drawn to {drawing}" in rows
    content = drawing.read_bytes()
    assert content.startswith(b"<?xml" if name.endswith("svg") else b"\x89PNG")

    if name.endswith("svg"):
        assert main(command) == 0
        assert drawing.read_bytes() == content


def test_a_plan_predicts_the_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    command = ["check", "--plan", str(CONFIGS_DIR / "qwen3_32b_grpo.yaml")]
    assert main(command) == 0
    rows = rows_of(capsys.readouterr().out)
    title = re.compile(r"Predicted step: ([\d,.]+) s, [\d,]+ tokens/s per device")
    seconds = float(next(found[1] for row in rows if (found := title.fullmatch(row))))
    # Phases take turns on the same devices, and the driver has its own time for each sample.
    names = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
    phases = {
        row.split()[0]: row.split() for row in rows if row.split()[:2] in [[name, "actor"] for name in names]
    }
    assert tuple(phases) == names
    driver_s = next(float(row.split()[1]) for row in rows if "of the driver" in row)
    assert sum(float(row[3]) for row in phases.values()) + driver_s == pytest.approx(seconds, abs=0.5)
    assert phases["gen"][2] == "0.0"
    assert phases["gen"][5] == "weights"
    assert any(
        row.startswith("assuming H100 80 GB SXM, prompts of 256 and responses of 4,096") for row in rows
    )

    # Another device gives another time, and a wrong name is refused.
    assert main([*command, "placement.device_profile=b200"]) == 0
    faster = next(row for row in rows_of(capsys.readouterr().out) if row.startswith("Predicted step"))
    assert float(faster.split()[2].replace(",", "")) < 0.7 * seconds
    assert main([*command, "placement.device_profile=h100_80"]) == 2
    assert "there is no device called 'h100_80'; did you mean h100_80gb?" in capsys.readouterr().err


def test_a_drawing_has_a_format_that_can_be_drawn(ppo: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plan", ppo, "--output", "plan.pdf"]) == 2
    assert ".svg or .png" in capsys.readouterr().err
