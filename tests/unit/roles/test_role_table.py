"""Test that one row in the role table defines a role: its model, processes, phase, memory and timing follow
from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config import roles
from megarl.config.roles import ROLES, Role, RoleKind, RolePhase, Stage, model_roles, role_named
from megarl.config.schema import PlacementStrategy, SFTConfig
from megarl.placement.dataflow import Item, overlaps, phases_of, step_phases, waits_for
from megarl.placement.memory import plan_memory
from megarl.placement.offload_plan import OffloadPlan
from megarl.placement.plan import plan_placement
from megarl.trainers.monitor import phases_by_call
from tests.unit.placement.test_memory import EVERY_ROLE, QWEN_7B, config

TEACHER = Role(
    name="teacher",
    kind=RoleKind.scorer,
    is_needed=lambda config: True,
    path_keys=("reference.path", "model.path"),
    parallel_key="actor.parallel",
    micro_batch_key="reference.micro_batch",
    megatron_keys=("reference.megatron", "actor.megatron"),
    shares_with=("actor",),
    phases=(RolePhase(name="teach", stage=Stage.score, calls=("log_probs",), writes=("teacher_log_prob",)),),
)


@pytest.fixture
def with_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "ROLES", (*ROLES, TEACHER))


@pytest.mark.usefixtures("with_teacher")
def test_the_run_has_a_model_that_is_configured_by_the_keys_of_the_row() -> None:
    run = config(PlacementStrategy.hybrid)
    run = replace(run, reference=replace(run.reference, path="teacher-folder"))
    teacher = model_roles(run)[-1]
    assert (teacher.name, teacher.path, teacher.path_key, teacher.optim) == (
        "teacher",
        "teacher-folder",
        "reference.path",
        None,
    )
    assert (teacher.parallel, teacher.micro_batch) == (run.actor.parallel, run.reference.micro_batch)
    assert [role.name for role in model_roles(SFTConfig())] == ["actor"]


@pytest.mark.usefixtures("with_teacher")
def test_its_phase_is_part_of_the_step() -> None:
    before = waits_for(step_phases())
    assert before["teach"] == {"gen"}
    assert "teach" in before["adv"] & before["update_actor"]  # which may read its column
    assert phases_by_call()["teacher", "log_probs"] == "teach"
    plan = plan_placement(config(PlacementStrategy.stand_alone))
    assert ("ref", "teach") in overlaps(plan)


@pytest.mark.usefixtures("with_teacher")
def test_it_is_placed_and_offloaded_with_the_others() -> None:
    hybrid = plan_placement(config(PlacementStrategy.hybrid))
    assert hybrid.group_of("teacher").roles == ("actor", "reference", "teacher")
    # the engines have the actor's devices
    assert Item("teacher", "parameters") in OffloadPlan(hybrid).offloadable
    assert plan_placement(config(PlacementStrategy.stand_alone)).role_pools["teacher"] == "teacher"


@pytest.mark.usefixtures("with_teacher")
def test_its_memory_is_planned() -> None:
    run = config(PlacementStrategy.fully_collocate)
    phases = plan_memory(run, plan_placement(run), {**EVERY_ROLE, "teacher": QWEN_7B})[0].phases
    assert phases["teach"]["teacher"].parameters == phases["ref"]["reference"].parameters > 0
    assert phases["gen"]["teacher"].parameters == 0


def test_without_the_row_there_is_no_such_role() -> None:
    run = config(PlacementStrategy.hybrid)
    assert [role.name for role in model_roles(run)] == ["actor", "reference", "critic"]
    assert {phase.name for phase in phases_of(plan_placement(run).roles)} == {
        phase.name for phase in step_phases()
    } - {"reward_model"}


def test_every_row_can_be_found_by_name() -> None:
    assert [role_named(role.name) for role in ROLES] == list(ROLES)
    assert len({phase.name for role in ROLES for phase in role.phases}) == sum(
        len(role.phases) for role in ROLES
    )
