"""What layouts of models with experts must satisfy: how experts are dealt and cut, in training and in an engine; and which models have the
routers that keys are about."""

from __future__ import annotations

from dataclasses import fields

from megarl.config.architecture import Architecture
from megarl.config.roles import ModelRole
from megarl.config.schema import ParallelConfig, PPOConfig, RolloutEngineKind
from megarl.config.violation import Violation, Violations, either, nearest_divisors

_ENGINE_KEY = "rollout.expert_parallel_size"


def fit_layout(role: ModelRole, architecture: Architecture) -> Violations:
    """Of one role's ranks and model."""
    parallel, keys = role.parallel, _Keys(role.parallel_key)
    experts = architecture.experts
    if experts is None:
        for name, key in (("expert_parallel_size", keys.dealt), ("expert_tensor_parallel_size", keys.cut)):
            if (size := getattr(parallel, name)) > 1:
                yield Violation((key,), f"is {size}, but {role.path} ({architecture.model_type}) has no experts; use 1")
        for each in fields(role.experts):
            if (value := getattr(role.experts, each.name)) != each.default:
                said = f"is {value}, but {role.path} ({architecture.model_type}) has no experts; leave it at {each.default}"
                yield Violation((f"{role.name}.experts.{each.name}",), said)
        return
    yield from _ranks(parallel, keys)
    if experts.num_experts % parallel.expert_parallel_size:
        yield Violation(
            (keys.dealt,),
            f"the {experts.num_experts} experts of {role.path} do not divide by expert_parallel_size {parallel.expert_parallel_size}; "
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
                f"an expert of {role.path} has intermediate size {width}, which does not divide by {name} {size}; "
                f"use {either(nearest_divisors(width, size))}",
            )
    if parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel:
        yield Violation(
            (f"{role.parallel_key}.sequence_parallel", keys.tensor),
            f"{role.path} has experts: with tensor_parallel_size {parallel.tensor_parallel_size} each token would go to them as often; "
            "use sequence_parallel=true",
        )


class _Keys:
    def __init__(self, section: str) -> None:
        self.tensor = f"{section}.tensor_parallel_size"
        self.dealt = f"{section}.expert_parallel_size"
        self.cut = f"{section}.expert_tensor_parallel_size"


def _ranks(parallel: ParallelConfig, keys: _Keys) -> Violations:
    """Experts are dealt over all ranks of a stage."""
    dealt, cut, there = parallel.expert_parallel_size, parallel.expert_tensor_parallel_size, parallel.stage_size
    if there % (dealt * cut):
        fitting = nearest_divisors(there // cut, dealt) if there % cut == 0 else nearest_divisors(there, dealt * cut)
        meant = "expert_parallel_size" if there % cut == 0 else "a product of"
        yield Violation(
            (keys.dealt, keys.cut),
            f"expert_parallel_size {dealt} x expert_tensor_parallel_size {cut} = {dealt * cut} does not divide the {there} ranks of "
            f"a stage (tensor x context x data); use {meant} {either(fitting)}",
        )


def engine_fits(config: PPOConfig, policy: Architecture) -> Violations:
    """An engine's ranks share the experts, and those that are left share each expert's matrices."""
    dealt, tensor = config.rollout.expert_parallel_size, config.rollout.tensor_parallel_size
    experts, path = policy.experts, config.model.path
    if experts is None:
        if dealt > 1:
            yield Violation((_ENGINE_KEY,), f"is {dealt}, but {path} ({policy.model_type}) has no experts; use 1")
        return
    if not config.rollout.engine.needs.cuts_models:
        others = " or ".join(engine.name for engine in RolloutEngineKind if engine.needs.cuts_models)
        yield Violation(
            ("rollout.engine",),
            f"the engine {config.rollout.engine.name!r} does not take weights of experts, which {path} has; use {others}",
        )
        return
    for problem, is_so in (
        ("dense layers between its sparse ones", policy.num_dense_layers > 0),
        ("a tied embedding", policy.tie_word_embeddings),
    ):
        if is_so:
            yield Violation(("rollout.engine",), f"{path} has experts and {problem}: SGLang's {policy.model_type} would be another model")
    if tensor % dealt:
        yield Violation(
            (_ENGINE_KEY, "rollout.tensor_parallel_size"),
            f"expert_parallel_size {dealt} does not divide tensor_parallel_size {tensor}, whose ranks share the experts; "
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
                f"{what} {width} of {path} does not divide over {size} ranks; use {either(nearest_divisors(width, size))} of them",
            )
