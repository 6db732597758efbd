"""What models with experts need: how experts are spread and cut, in training and in an engine; which models
have the routers that keys are about; and whose routes an update may replay."""

from __future__ import annotations

from dataclasses import fields

from megarl.config.roles import ModelRole, scores_in_update
from megarl.config.schema import (
    OnUpdate,
    ParallelConfig,
    PPOConfig,
    RolloutEngineKind,
    RoutingReplay,
    SFTConfig,
)
from megarl.config.violation import Violation, Violations, either, nearest_divisors
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES

_ENGINE_KEY = "rollout.expert_parallel_size"
_REPLAY = "engine.routing_replay"


def fit_layout(role: ModelRole, architecture: Architecture) -> Violations:
    """Of one role's ranks and model."""
    parallel = role.parallel
    keys = _Keys(role.parallel_key)
    experts = architecture.experts

    # A dense model: settings for experts would silently have no effect.
    if experts is None:
        for name, key in (("expert_parallel_size", keys.dealt), ("expert_tensor_parallel_size", keys.cut)):
            if (size := getattr(parallel, name)) > 1:
                yield Violation(
                    (key,), f"is {size}, but {role.path} ({architecture.model_type}) has no experts; use 1"
                )
        for each in fields(role.experts):
            if (value := getattr(role.experts, each.name)) != each.default:
                said = (
                    f"is {value}, but {role.path} ({architecture.model_type}) has no experts; leave it "
                    f"at {each.default}"
                )
                yield Violation((f"{role.name}.experts.{each.name}",), said)
        return

    # Experts have to divide evenly over the ranks, and so does each expert's width.
    yield from _ranks(parallel, keys)
    if experts.num_experts % parallel.expert_parallel_size:
        yield Violation(
            (keys.dealt,),
            f"the {experts.num_experts} experts of {role.path} do not divide by expert_parallel_size "
            f"{parallel.expert_parallel_size}; "
            f"use {either(nearest_divisors(experts.num_experts, parallel.expert_parallel_size))}",
        )

    for width, size, key in (
        (experts.intermediate_size, parallel.expert_tensor_parallel_size, keys.cut),
        (experts.shared_intermediate_size, parallel.tensor_parallel_size, keys.tensor),
    ):
        if width % size:
            name = key.rpartition(".")[2]
            yield Violation(
                (key,),
                f"an expert of {role.path} has intermediate size {width}, which does not divide by {name} "
                f"{size}; "
                f"use {either(nearest_divisors(width, size))}",
            )

    # Tensor-parallel ranks hold the same tokens unless sequence parallelism splits them.
    if parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel:
        yield Violation(
            (f"{role.parallel_key}.sequence_parallel", keys.tensor),
            f"{role.path} has experts: with tensor_parallel_size {parallel.tensor_parallel_size} each token "
            f"would go to them as often; "
            "use sequence_parallel=true",
        )


class _Keys:
    def __init__(self, section: str) -> None:
        self.tensor = f"{section}.tensor_parallel_size"
        self.dealt = f"{section}.expert_parallel_size"
        self.cut = f"{section}.expert_tensor_parallel_size"


def _ranks(parallel: ParallelConfig, keys: _Keys) -> Violations:
    """Experts are distributed over all ranks of a stage."""
    dealt = parallel.expert_parallel_size
    cut = parallel.expert_tensor_parallel_size
    there = parallel.stage_size

    if there % (dealt * cut):
        # Suggest one size where changing it alone is enough, and otherwise the product of both.
        fitting = (
            nearest_divisors(there // cut, dealt)
            if there % cut == 0
            else nearest_divisors(there, dealt * cut)
        )
        meant = "expert_parallel_size" if there % cut == 0 else "a product of"
        yield Violation(
            (keys.dealt, keys.cut),
            f"expert_parallel_size {dealt} x expert_tensor_parallel_size {cut} = {dealt * cut} does not "
            f"divide the {there} ranks of "
            f"a stage (tensor x context x data); use {meant} {either(fitting)}",
        )


def engine_fits(config: PPOConfig, policy: Architecture) -> Violations:
    """An engine's ranks share the experts, and those that are left share each expert's matrices."""
    dealt = config.rollout.expert_parallel_size
    tensor = config.rollout.tensor_parallel_size
    experts = policy.experts
    path = config.model.path

    if experts is None:
        if dealt > 1:
            yield Violation(
                (_ENGINE_KEY,), f"is {dealt}, but {path} ({policy.model_type}) has no experts; use 1"
            )
        return

    if not config.rollout.engine.needs.cuts_models:
        others = " or ".join(engine.name for engine in RolloutEngineKind if engine.needs.cuts_models)
        yield Violation(
            ("rollout.engine",),
            f"the engine {config.rollout.engine.name!r} does not take weights of experts, which {path} has; "
            f"use {others}",
        )
        return

    # A configuration that SGLang's class does not follow would silently be another model.
    for difference in FAMILIES[policy.model_type].sglang_differs(policy):
        yield Violation(
            ("rollout.engine",),
            f"{path} has experts and {difference}: SGLang's {policy.model_type} would be another model",
        )

    # The checks below divide by tensor // dealt, which has to be exact.
    if tensor % dealt:
        yield Violation(
            (_ENGINE_KEY, "rollout.tensor_parallel_size"),
            f"expert_parallel_size {dealt} does not divide tensor_parallel_size {tensor}, whose ranks share "
            f"the experts; "
            f"use {either(nearest_divisors(tensor, dealt))}",
        )
        return

    for width, size, what in (
        (experts.num_experts, dealt, "num_experts"),
        (experts.intermediate_size, tensor // dealt, "the experts' intermediate size"),
        (experts.shared_intermediate_size, tensor, "the shared expert's intermediate size"),
    ):
        if width % size:
            yield Violation(
                (_ENGINE_KEY, "rollout.tensor_parallel_size"),
                f"{what} {width} of {path} does not divide over {size} ranks; use "
                f"{either(nearest_divisors(width, size))} of them",
            )


def no_routing_replay(config: SFTConfig) -> Violations:
    """Check that a supervised run, for which nobody has routed tokens yet, replays no routes."""
    replay = config.engine.routing_replay
    if replay is not RoutingReplay.off:
        yield Violation((_REPLAY,), f"is {replay.value}, but chats have no routes; use off")


def routing_replay(config: PPOConfig, policy: Architecture) -> Violations:
    """Check that there are routes to replay, and an actor that can take them."""
    replay = config.engine.routing_replay
    if replay is RoutingReplay.off:
        return

    if policy.experts is None:
        message = f"is {replay.value}, but {config.model.path} ({policy.model_type}) has no experts; use off"
        yield Violation((_REPLAY,), message)
        return

    if not config.engine.packing:
        yield Violation(
            (_REPLAY, "engine.packing"),
            f"is {replay.value}, which needs rows that are packed; use engine.packing=true, or off",
        )

    # Routes come from the trainer's scoring pass, or from the engine that generated.
    if replay is RoutingReplay.trainer:
        yield from _routes_of_scoring(config)
    else:
        yield from _routes_of_engine(config)


def _routes_of_scoring(config: PPOConfig) -> Violations:
    if config.algorithm.rollout_correction.bypass:
        yield Violation(
            (_REPLAY, "algorithm.rollout_correction.bypass"),
            "is trainer, but with bypass no pass of the trainer computes old_log_probs, whose routes could "
            "be replayed; use rollout or off",
        )
    elif scores_in_update(config.algorithm, one_update=config.trainer.one_update):
        yield Violation(
            (_REPLAY, "trainer.updates_per_step", "trainer.epochs_per_batch"),
            "is trainer, but with one update per batch that update's own pass computes old_log_probs, and "
            "there is nothing to replay; use "
            "off, rollout, or more updates",
        )


def _routes_of_engine(config: PPOConfig) -> Violations:
    engine = config.rollout.engine
    if not engine.needs.returns_routes:
        others = " or ".join(kind.name for kind in RolloutEngineKind if kind.needs.returns_routes)
        yield Violation(
            (_REPLAY, "rollout.engine"),
            f"is rollout, but the engine {engine.name!r} does not say its routes; use the engine {others}, "
            f"or off",
        )

    # One sample would have tokens of several weight versions, each with its own routes.
    if config.rollout.max_staleness and config.rollout.on_update is OnUpdate.continue_:
        yield Violation(
            (_REPLAY, "rollout.max_staleness", "rollout.on_update"),
            f"is rollout, but with max_staleness {config.rollout.max_staleness} samples continue with new "
            f"weights, which "
            "route their tokens again: the returned routes do not match the log-probs; use on_update=drain, "
            "max_staleness=0, or trainer",
        )

    if config.agent.is_used:
        yield Violation(
            (_REPLAY, "agent"),
            "is rollout, but an episode is written in several requests, whose routes are not put together; "
            "use trainer",
        )
