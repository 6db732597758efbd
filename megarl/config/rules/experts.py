"""Rules for mixture-of-experts models.

They cover expert parallelism in training and in an engine, router settings, and router replay.
"""

from __future__ import annotations

from megarl.config.finding import (
    Finding,
    Findings,
    Refusal,
    conflicts,
    either,
    nearest_divisors,
    refusals,
)
from megarl.config.roles import ModelRole, scores_in_update
from megarl.config.schema import (
    ATTENTION_GROUPS,
    Device,
    Layers,
    OnUpdate,
    ParallelConfig,
    PPOConfig,
    RolloutEngineKind,
    RoutingReplay,
    RunConfig,
)
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture, Experts
from megarl.models.families import FAMILIES
from megarl.models.layers import routes_tokens

_ENGINE_KEY = "rollout.expert_parallel_size"


def fit_layout(_: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check the layout of one role's model."""
    parallel = role.parallel
    key = role.parallel_key
    if not routes_tokens(architecture):
        return

    experts = architecture.sizes_of(Experts)
    yield from _fit_router(role, architecture, experts)
    if architecture.linear_bias and parallel.expert_tensor_parallel_size > 1:
        yield Finding(
            (f"{key}.expert_tensor_parallel_size",),
            f"is {parallel.expert_tensor_parallel_size}, but the experts of {role.path} "
            f"({architecture.model_type}) have biases, which Megatron does not shard; use 1",
        )

    # The experts and each expert's width have to divide evenly over the ranks.
    yield from _ranks(parallel, key)
    if experts.num_experts % parallel.expert_parallel_size:
        yield Finding(
            (f"{key}.expert_parallel_size",),
            f"the {experts.num_experts} experts of {role.path} do not divide by expert_parallel_size "
            f"{parallel.expert_parallel_size}; use "
            f"{either(nearest_divisors(experts.num_experts, parallel.expert_parallel_size))}",
        )

    for width, size, name in (
        (experts.intermediate_size, parallel.expert_tensor_parallel_size, "expert_tensor_parallel_size"),
        (experts.shared_intermediate_size, parallel.tensor_parallel_size, "tensor_parallel_size"),
    ):
        if width % size:
            yield Finding(
                (f"{key}.{name}",),
                f"an expert of {role.path} has intermediate size {width}, which does not divide by {name} "
                f"{size}; use {either(nearest_divisors(width, size))}",
            )

    # Tensor-parallel ranks have the same tokens unless sequence parallelism splits them.
    if parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel:
        yield Finding(
            (f"{key}.sequence_parallel", f"{key}.tensor_parallel_size"),
            f"{role.path} has experts, and without sequence parallelism each of the "
            f"{parallel.tensor_parallel_size} tensor-parallel ranks would send them the same tokens; use "
            f"sequence_parallel=true",
        )


def _fit_router(role: ModelRole, architecture: Architecture, experts: Experts) -> Findings:
    """Check the updates of the routers' selection bias."""
    rate = role.routers.bias_update_rate
    key = f"{role.name}.experts.bias_update_rate"
    yield from refusals(
        (
            (key,),
            rate != 0 and not experts.has_selection_bias,
            f"is {rate}, but the routers of {role.path} ({architecture.model_type}) have no selection bias; "
            "use 0",
        ),
        (
            (key, f"{role.name}.experts.freeze_router"),
            rate != 0 and experts.has_selection_bias and role.routers.freeze_router,
            f"is {rate}, but freeze_router keeps routers as loaded; use 0, or freeze_router=false",
        ),
    )


def _ranks(parallel: ParallelConfig, key: str) -> Findings:
    """Check that the expert-parallel sizes divide the ranks of a stage."""
    expert_parallel = parallel.expert_parallel_size
    expert_tensor = parallel.expert_tensor_parallel_size
    num_ranks = parallel.stage_size

    if num_ranks % (expert_parallel * expert_tensor):
        # Suggest one size if changing it alone is enough, otherwise the product of both.
        fitting = (
            nearest_divisors(num_ranks // expert_tensor, expert_parallel)
            if num_ranks % expert_tensor == 0
            else nearest_divisors(num_ranks, expert_parallel * expert_tensor)
        )
        meant = "expert_parallel_size" if num_ranks % expert_tensor == 0 else "a product of"
        yield Finding(
            (f"{key}.expert_parallel_size", f"{key}.expert_tensor_parallel_size"),
            f"expert_parallel_size {expert_parallel} x expert_tensor_parallel_size {expert_tensor} = "
            f"{expert_parallel * expert_tensor} does not divide the {counted(num_ranks, 'rank')} of a stage "
            f"(tensor x context x data); use {meant} {either(fitting)}",
        )


def layers_fit(config: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that Transformer Engine's layers are not used for experts with biases."""
    if architecture.linear_bias and not (config.device is Device.cpu or config.engine.layers is Layers.local):
        yield Finding(
            ("engine.layers",),
            f"is {config.engine.layers.value}, but the experts of {role.path} ({architecture.model_type}) "
            "have biases, which megarl supports with local layers only; use local",
        )


def attention_fits(config: PPOConfig, policy: Architecture) -> Findings:
    """Check the groups of an engine's devices that each compute the attention of their own sequences."""
    rollout = config.rollout
    groups = rollout.sglang.server_args.get(ATTENTION_GROUPS)
    if groups is None:
        return

    key = f"rollout.sglang.server_args.{ATTENTION_GROUPS}"
    if not isinstance(groups, int) or groups < 1 or rollout.tensor_parallel_size % groups:
        yield Finding(
            (key, "rollout.tensor_parallel_size"),
            f"is {groups!r}, but must divide tensor_parallel_size {rollout.tensor_parallel_size}; use "
            f"{either(nearest_divisors(rollout.tensor_parallel_size, 2))}",
        )
        return

    others = (
        (("device",), config.device is Device.cpu, "but SGLang has no such attention on a CPU; use 1"),
        (("model.path",), not routes_tokens(policy), "but the model is dense; use more engines, and 1"),
        (
            ("model.path",),
            routes_tokens(policy) and not FAMILIES[policy.model_type].sglang_groups,
            f"but megarl has no test of it with {policy.model_type} in SGLang; use more engines, and 1",
        ),
        (
            ("rollout.pipeline_parallel_size",),
            rollout.pipeline_parallel_size > 1,
            "but megarl has no test of it with pipeline stages; use 1 for one of them",
        ),
        (
            ("actor.lora.sync",),
            config.actor.served_adapters is not None,
            "but megarl has no test of it with adapters in engines; use merged ones, or 1",
        ),
        (
            ("engine.routing_replay",),
            config.engine.routing_replay is RoutingReplay.rollout,
            "but megarl has no test of it with routes of engines; use trainer, off, or 1",
        ),
        (
            ("rollout.sglang.server_args.speculative_algorithm",),
            rollout.sglang.server_args.get("speculative_algorithm") is not None,
            "but megarl has no test of it with drafts; remove speculative_algorithm, or use 1",
        ),
    )

    if groups != 1:
        yield from conflicts(key, f"is {groups!r}, ", *others)


def engine_fits(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that an engine's ranks can shard the experts and each expert's matrices."""
    expert_parallel = config.rollout.expert_parallel_size
    tensor = config.rollout.tensor_parallel_size
    path = config.model.path

    if not routes_tokens(policy):
        return

    if not config.rollout.engine.needs.cuts_models:
        others = " or ".join(engine.name for engine in RolloutEngineKind if engine.needs.cuts_models)
        yield Finding(
            ("rollout.engine",),
            f"the engine {config.rollout.engine.name!r} does not support mixture-of-experts models such as "
            f"{path}; use {others}",
        )
        return

    yield from refusals(
        (
            (_ENGINE_KEY,),
            policy.linear_bias and expert_parallel > 1,
            f"is {expert_parallel}, but SGLang's class of {path} ({policy.model_type}) loads the experts of "
            "all ranks into each rank; use 1",
        ),
        (
            ("model.path", "rollout.engine"),
            policy.is_packed,
            f"{path} has its experts in MXFP4, for which SGLang would build layers that cannot receive "
            f"bfloat16; convert it with `megarl convert {path} NEW_FOLDER --to hf`",
        ),
    )

    # The checks below use tensor // expert_parallel, which has to be exact.
    if tensor % expert_parallel:
        yield Finding(
            (_ENGINE_KEY, "rollout.tensor_parallel_size"),
            f"expert_parallel_size {expert_parallel} does not divide tensor_parallel_size {tensor}, over "
            "whose ranks the experts are distributed; use "
            f"{either(nearest_divisors(tensor, expert_parallel))}",
        )
        return

    experts = policy.sizes_of(Experts)
    for width, size, what in (
        (experts.num_experts, expert_parallel, "num_experts"),
        (experts.intermediate_size, tensor // expert_parallel, "the experts' intermediate size"),
        (experts.shared_intermediate_size, tensor, "the shared expert's intermediate size"),
    ):
        if width % size:
            yield Finding(
                (_ENGINE_KEY, "rollout.tensor_parallel_size"),
                f"{what} {width} of {path} does not divide over {size} ranks; use "
                f"{either(nearest_divisors(width, size))} of them",
            )


def routing_replay(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that the policy has routes to replay, and that the actor can replay them."""
    replay = config.engine.routing_replay
    if replay is RoutingReplay.off or not routes_tokens(policy):
        return

    # Routes come from the trainer's scoring pass, or from the engine that generated.
    of_source = _without_scoring if replay is RoutingReplay.trainer else _without_routes_of_engine
    yield from conflicts(
        "engine.routing_replay",
        f"is {replay.value}, ",
        (
            ("engine.packing",),
            not config.engine.packing,
            "which requires packed rows; use engine.packing=true, or off",
        ),
        # Megatron's fused router returns before it asks for the routes to replay.
        (
            ("actor.megatron.transformer.moe_router_fusion",),
            bool(config.actor.megatron.transformer.get("moe_router_fusion")),
            "but a fused router selects experts itself and replays no routes; use "
            "actor.megatron.transformer.moe_router_fusion=false, or off",
        ),
        *of_source(config),
    )


def _without_scoring(config: PPOConfig) -> tuple[Refusal, ...]:
    bypass = config.algorithm.rollout_correction.bypass
    return (
        (
            ("algorithm.rollout_correction.bypass",),
            bypass,
            "but with bypass the trainer does not compute old_log_probs, so there are no routes to replay; "
            "use rollout or off",
        ),
        (
            ("trainer.updates_per_step", "trainer.epochs_per_batch"),
            not bypass and scores_in_update(config.algorithm, one_update=config.trainer.one_update),
            "but with one update per batch the update itself computes old_log_probs, so there are no routes "
            "to replay; use off, rollout, or more updates",
        ),
    )


def _without_routes_of_engine(config: PPOConfig) -> tuple[Refusal, ...]:
    rollout = config.rollout
    others = " or ".join(kind.name for kind in RolloutEngineKind if kind.needs.returns_routes)
    return (
        (
            ("rollout.engine",),
            not rollout.engine.needs.returns_routes,
            f"but the engine {rollout.engine.name!r} does not return routes; use the engine {others}, or off",
        ),
        # A sample would have tokens from several weight versions, each with different routes.
        (
            ("rollout.max_staleness", "rollout.on_update"),
            rollout.max_staleness > 0 and rollout.on_update is OnUpdate.continue_,
            f"but with max_staleness {rollout.max_staleness} samples continue with new weights, which route "
            "their tokens differently, so the returned routes do not match the log-probs; use "
            "on_update=drain, max_staleness=0, or trainer",
        ),
        (
            ("agent",),
            config.agent.is_used,
            "but an episode consists of several requests, whose routes are not concatenated; use trainer",
        ),
    )
