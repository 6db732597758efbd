"""Test that one row in the role table defines a role: its model, processes, phase, memory and timing follow
from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config import roles
from megarl.config.roles import (
    ROLES,
    Role,
    RoleKind,
    RolePhase,
    Stage,
    absent_teacher,
    model_roles,
    role_named,
    teachers_by_source,
)
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    FrozenMegatronConfig,
    KLConfig,
    KLWhere,
    MicroBatchConfig,
    ParallelConfig,
    PlacementStrategy,
    PPOConfig,
    SFTConfig,
    SourceTeacherConfig,
    TeacherConfig,
)
from megarl.plan.placement.dataflow import Item, OffloadPlan, overlaps, phases_of, step_phases, waits_for
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.model_state import stage_parameters
from megarl.plan.placement.plan import plan_placement
from megarl.trainers.monitor import phases_by_call
from tests.unit.plan.placement.test_memory import EVERY_ROLE, QWEN_7B, config

EXAMINER = Role(
    name="examiner",
    kind=RoleKind.scorer,
    is_needed=lambda config: True,
    path_keys=("reference.path", "model.path"),
    parallel_key="actor.parallel",
    micro_batch_key="reference.micro_batch",
    megatron_keys=("reference.megatron", "actor.megatron"),
    may_share_with=("actor",),
    phases=(
        RolePhase(name="examine", stage=Stage.score, calls=("log_probs",), writes=("examiner_log_prob",)),
    ),
)


@pytest.fixture
def with_examiner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "ROLES", (*ROLES, EXAMINER))


@pytest.mark.usefixtures("with_examiner")
def test_the_run_has_a_model_that_is_configured_by_the_keys_of_the_row() -> None:
    run = config(PlacementStrategy.hybrid)
    run = replace(run, reference=replace(run.reference, path="other-folder"))
    examiner = model_roles(run)[-1]
    assert (examiner.name, examiner.path, examiner.path_key, examiner.optim) == (
        "examiner",
        "other-folder",
        "reference.path",
        None,
    )
    assert (examiner.parallel, examiner.micro_batch) == (run.actor.parallel, run.reference.micro_batch)
    assert [role.name for role in model_roles(SFTConfig())] == ["actor"]


@pytest.mark.usefixtures("with_examiner")
def test_its_phase_is_part_of_the_step() -> None:
    before = waits_for(step_phases())
    assert before["examine"] == {"gen"}
    assert "examine" in before["adv"] & before["update_actor"]  # which may read its column
    assert phases_by_call()["examiner", "log_probs"] == "examine"
    plan = plan_placement(config(PlacementStrategy.stand_alone))
    assert ("ref", "examine") in overlaps(plan)


@pytest.mark.usefixtures("with_examiner")
def test_it_is_placed_and_offloaded_with_the_others() -> None:
    hybrid = plan_placement(config(PlacementStrategy.hybrid))
    assert hybrid.group_of("examiner").roles == ("actor", "reference", "examiner")
    # the engines have the actor's devices
    assert Item("examiner", "parameters") in OffloadPlan(hybrid).offloadable
    assert plan_placement(config(PlacementStrategy.stand_alone)).role_pools["examiner"] == "examiner"


@pytest.mark.usefixtures("with_examiner")
def test_its_memory_is_planned() -> None:
    run = config(PlacementStrategy.fully_collocate)
    phases = plan_memory(run, plan_placement(run), {**EVERY_ROLE, "examiner": QWEN_7B})[0].phases
    assert phases["examine"]["examiner"].parameters == phases["ref"]["reference"].parameters > 0
    assert phases["gen"]["examiner"].parameters == 0


def test_without_the_row_there_is_no_such_role() -> None:
    run = config(PlacementStrategy.hybrid)
    assert [role.name for role in model_roles(run)] == ["actor", "reference", "critic"]
    assert {phase.name for phase in phases_of(plan_placement(run).roles)} == {
        phase.name for phase in step_phases()
    } - {"reward_model", "teacher"}


def test_every_row_can_be_found_by_name() -> None:
    assert [role_named(role.name) for role in ROLES] == list(ROLES)
    assert len({phase.name for role in ROLES for phase in role.phases}) == sum(
        len(role.phases) for role in ROLES
    )


def distilled(strategy: PlacementStrategy) -> PPOConfig:
    """A run with a teacher in two pipeline stages, next to an actor of four tensor-parallel ranks."""
    run = config(strategy)
    teacher = TeacherConfig(
        path="teacher-folder",
        parallel=ParallelConfig(pipeline_parallel_size=2),
        micro_batch=run.reference.micro_batch,
        megatron=FrozenMegatronConfig(transformer={"fp8": "hybrid"}),
    )
    advantage = AdvantageConfig(estimator=AdvantageEstimator.distillation)
    algorithm = replace(run.algorithm, advantage=advantage, kl=KLConfig(where=KLWhere.none))
    return replace(run, teacher=teacher, algorithm=algorithm)


def test_a_teacher_has_a_folder_a_layout_and_options_of_its_own() -> None:
    run = distilled(PlacementStrategy.hybrid)
    actor, teacher = model_roles(run)
    assert (actor.name, teacher.name, teacher.kind) == ("actor", "teacher", RoleKind.teacher)
    assert (teacher.path, teacher.path_key) == ("teacher-folder", "teacher.path")
    assert (teacher.parallel, teacher.micro_batch) == (run.teacher.parallel, run.teacher.micro_batch)
    assert teacher.megatron.transformer == {"fp8": "hybrid"}
    assert teacher.optim is None
    assert [role.name for role in model_roles(replace(run, teacher=TeacherConfig()))] == ["actor"]
    grpo = replace(
        run, algorithm=replace(run.algorithm, advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo))
    )
    assert [role.name for role in model_roles(grpo)] == ["actor"]


def of_sources(strategy: PlacementStrategy) -> PPOConfig:
    """A run with two teachers of data sources next to the teacher of all others."""
    run = distilled(strategy)
    math = SourceTeacherConfig(name="math", path="math-folder", data_sources=["gsm8k"])
    code = SourceTeacherConfig(
        name="code",
        path="code-folder",
        parallel=ParallelConfig(tensor_parallel_size=2),
        micro_batch=MicroBatchConfig(max_tokens=4096),
        data_sources=["apps", "taco"],
    )
    return replace(run, teachers=[math, code])


def test_each_teacher_of_data_sources_is_a_role() -> None:
    run = of_sources(PlacementStrategy.stand_alone)
    names = ["teacher", "teacher_math", "teacher_code"]
    actor, *teachers = model_roles(run)
    assert [role.name for role in teachers] == names
    assert {role.kind for role in teachers} == {RoleKind.teacher}
    code = teachers[-1]
    assert (code.path, code.path_key, code.parallel_key) == (
        "code-folder",
        "teachers[1].path",
        "teachers[1].parallel",
    )
    assert (code.parallel, code.micro_batch) == (run.teachers[1].parallel, run.teachers[1].micro_batch)
    assert [role.name for role in model_roles(replace(run, teacher=TeacherConfig()))] == ["actor", *names[1:]]
    assert teachers_by_source(run) == {
        "gsm8k": "teacher_math",
        "apps": "teacher_code",
        "taco": "teacher_code",
    }

    # They score at the same time, before the advantages.
    plan = plan_placement(run)
    assert ("teacher_math", "teacher_code") in overlaps(plan)
    before = waits_for(phases_of(plan.roles))
    assert {*names} <= before["adv"]
    assert before["teacher_math"] == {"gen"}
    assert phases_by_call(names)["teacher_math", "log_probs"] == "teacher_math"


def test_teachers_of_data_sources_take_turns_on_the_devices_of_the_actor() -> None:
    run = of_sources(PlacementStrategy.hybrid)
    plan = plan_placement(run)
    models = {"actor": QWEN_7B, **dict.fromkeys(("teacher", "teacher_math", "teacher_code"), QWEN_7B)}
    assert plan.share_devices("teacher_math", "teacher_code")
    assert Item("teacher_code", "parameters") in OffloadPlan(plan).offloadable
    phases = plan_memory(run, plan, models)[0].phases
    math = phases["teacher_math"]["teacher_math"].parameters
    assert math == 2 * stage_parameters(QWEN_7B, ParallelConfig(), 0, with_value_head=False).total
    assert phases["teacher_code"]["teacher_math"].parameters == 0
    assert phases["teacher_code"]["teacher_code"].parameters == pytest.approx(math / 2, rel=0.01)


def test_a_data_source_without_a_teacher() -> None:
    run = of_sources(PlacementStrategy.hybrid)
    assert absent_teacher(run, ["gsm8k", "other"]) is None
    alone = replace(run, teacher=TeacherConfig())
    assert absent_teacher(alone, ["taco", "gsm8k"]) is None
    assert absent_teacher(alone, ["gsm8k", "other"]) == (
        "no teacher scores the samples of data_source 'other'; `teachers` have 'gsm8k', 'apps', 'taco'",
        "add it to the data_sources of one of them, or set teacher.path to a teacher of all others",
    )


def test_a_teacher_shares_the_devices_of_the_actor_in_processes_of_its_own() -> None:
    for strategy in (PlacementStrategy.hybrid, PlacementStrategy.split_collocate):
        plan = plan_placement(distilled(strategy))
        assert plan.group_of("teacher").roles == ("teacher",)
        assert plan.share_devices("actor", "teacher")
    hybrid = OffloadPlan(plan_placement(distilled(PlacementStrategy.hybrid)))
    assert Item("teacher", "parameters") in hybrid.offloadable
    alone = plan_placement(distilled(PlacementStrategy.stand_alone))
    assert alone.role_pools["teacher"] == "teacher"
    assert ("old_log_prob", "teacher") in overlaps(alone)


def test_the_phase_of_a_teacher_is_before_the_advantages() -> None:
    before = waits_for(step_phases())
    assert before["teacher"] == {"gen"}
    assert "teacher" in before["adv"] & before["update_actor"]
    assert phases_by_call()["teacher", "log_probs"] == "teacher"


def test_the_memory_of_a_teacher_is_that_of_its_own_stages() -> None:
    run = distilled(PlacementStrategy.stand_alone)
    half = replace(QWEN_7B, num_hidden_layers=14)
    devices = plan_memory(run, plan_placement(run), {"actor": QWEN_7B, "teacher": half})
    first, last = [device.phases["teacher"]["teacher"] for device in devices if device.pool == "teacher"]
    stages = [stage_parameters(half, run.teacher.parallel, stage, with_value_head=False) for stage in (0, 1)]
    assert [first.parameters, last.parameters] == [2 * stage.total for stage in stages]  # in bfloat16
    assert (first.gradients, first.optimizer) == (0, 0)
