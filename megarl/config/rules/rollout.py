"""Rules for the section `rollout`.

They cover samplers that training supports, engines that fit the model and the devices, async rollout
(`max_staleness` above 0), and engines with pipeline stages (`pipeline_parallel_size` above 1).
"""

from __future__ import annotations

from itertools import chain

from megarl.config.finding import Finding, Findings, conflicts, either, nearest_divisors, refusals
from megarl.config.roles import WITHOUT_DEVICES
from megarl.config.schema import (
    ATTENTION_GROUPS,
    CorrectionLevel,
    Device,
    EngineDType,
    OnUpdate,
    PlacementStrategy,
    PPOConfig,
    RolloutEngineKind,
    RoutingReplay,
)
from megarl.config.speculation import ALGORITHM, SECTION
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES, read_fields
from megarl.models.family import SGLangStages
from megarl.models.layers import kinds_of
from megarl.models.rope import sglang_rope_differs
from megarl.models.tensor_table import dimension_sizes

_LEAST_TEMPERATURE = 0.01
_TP = "rollout.tensor_parallel_size"
_PP = "rollout.pipeline_parallel_size"


def sampling(config: PPOConfig) -> Findings:
    """Check the sampling settings of training and validation."""
    rollout = config.rollout
    validation = rollout.validation
    most = config.data.max_response_length

    yield from refusals(
        # The trainer's log-probs must be those of the sampling distribution.
        (
            ("rollout.temperature",),
            rollout.temperature == 0,
            "is 0 (greedy), but training needs samples of the policy; use 1.0, the usual choice",
        ),
        *(
            (
                (f"{section}.temperature",),
                0 < temperature < _LEAST_TEMPERATURE,
                f"is {temperature:g}: logits divided by it exceed the resolution of bfloat16; use "
                f"{_LEAST_TEMPERATURE} or more",
            )
            for section, temperature in (
                ("rollout", rollout.temperature),
                ("rollout.validation", validation.temperature),
            )
        ),
        # Validation samples are not trained on, so any meaningful sampler is allowed.
        (
            ("rollout.validation.top_k",),
            validation.top_k != -1 and validation.top_k < 1,
            f"is {validation.top_k}, but must be at least 1, or -1 for all tokens",
        ),
        (
            ("rollout.validation.n", "rollout.validation.temperature"),
            validation.n > 1 and validation.temperature == 0,
            f"{validation.n} greedy samples of a prompt are identical; use n=1, or a temperature above 0",
        ),
        (
            ("rollout.validation.min_new_tokens", "data.max_response_length"),
            validation.min_new_tokens > most,
            f"min_new_tokens {validation.min_new_tokens} is above max_response_length {most}; use {most} or "
            "fewer",
        ),
    )


def whole_model(config: PPOConfig) -> Findings:
    """Check that the engine can shard a model, if it has to."""
    rollout = config.rollout
    if rollout.engine.needs.cuts_models:
        return
    others = " or ".join(engine.name for engine in RolloutEngineKind if engine.needs.cuts_models)
    for key in (_TP, _PP):
        name = key.removeprefix("rollout.")
        if (size := getattr(rollout, name)) != 1:
            yield Finding(
                (key, "rollout.engine"),
                f"the engine {rollout.engine.name!r} cannot shard a model, but {name} is {size}; use 1 (and "
                f"raise rollout.num_replicas for more throughput), or rollout.engine={others}",
            )


def engine_memory(config: PPOConfig) -> Findings:
    """Check the engine's share of a device, which the memory plan uses."""
    for engine in RolloutEngineKind:
        key = engine.needs.memory_key
        share = config.rollout.memory_share_of(engine)
        if key is None or share is None or (isinstance(share, int | float) and 0 < share < 1):
            continue
        yield Finding(
            (key,),
            f"is {share!r}, but must be above 0 and below 1: the fraction of a device for weights and "
            "cache, such as 0.8",
        )


def shared_devices(config: PPOConfig) -> Findings:
    """Check that the engines fit the actor's devices in the placement `hybrid`."""
    rollout = config.rollout
    size = rollout.devices_per_engine
    needed = rollout.num_replicas * size
    there = config.actor.parallel.world_size
    if config.placement.strategy is not PlacementStrategy.hybrid or needed <= there:
        return

    # Without room for even one engine, only a smaller engine helps.
    fitting = there // size
    stages = rollout.pipeline_parallel_size
    smaller = "tensor_parallel_size" if stages == 1 else "tensor_parallel_size x pipeline_parallel_size"
    hint = f"use num_replicas {fitting} or fewer" if fitting else f"use {smaller} {there} or less"
    in_stages = f" x pipeline_parallel_size {stages}" if stages > 1 else ""

    yield Finding(
        ("rollout.num_replicas", _TP, _PP, "actor.parallel", "placement.strategy"),
        f"num_replicas {rollout.num_replicas} x tensor_parallel_size "
        f"{rollout.tensor_parallel_size}{in_stages} = {counted(needed, 'device')}, but in the placement "
        f"'hybrid' the engines share the actor's {there}; {hint}, a larger actor layout, or the placement "
        "split_collocate",
    )


def engine_fits_model(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that an engine computes the same model and can shard it.

    Query heads, key heads of states and the MLP must divide evenly. Key-value heads are divided over ranks or
    replicated.
    """
    tensor = config.rollout.tensor_parallel_size
    path = config.model.path
    if not config.rollout.engine.needs.cuts_models:
        for kind in (kind for kind in kinds_of(policy) if kind.state != "0"):
            yield Finding(
                ("rollout.engine",),
                f"{path} ({policy.model_type}) has {kind.name}, whose states the engine "
                f"{config.rollout.engine.name!r} does not keep; use sglang, with device=cuda",
            )
        return

    family = FAMILIES[policy.model_type]
    if not family.sglang_class:
        others = " or ".join(engine.name for engine in RolloutEngineKind if not engine.needs.cuts_models)
        yield Finding(
            ("rollout.engine",), f"SGLang has no class for {path} ({policy.model_type}); use {others}"
        )

    if refused := family.sglang_refuses(read_fields(path)):
        yield Finding(
            ("rollout.engine",),
            f"SGLang's {policy.model_type} refuses the config.json of {path}, which has {refused}",
        )

    # SGLang would silently compute a different model if its class ignores a setting.
    for difference in chain(sglang_rope_differs(policy), family.sglang_differs(policy)):
        yield Finding(
            ("rollout.engine",),
            f"{path} has {difference}: SGLang's {policy.model_type} would compute a different model",
        )

    kinds = kinds_of(policy)
    sizes = dimension_sizes(policy)
    for lack in (*(kind.cpu_engine_lacks for kind in kinds), family.cpu_engine_lacks):
        if lack and config.device is Device.cpu:
            yield Finding(
                ("device", "rollout.engine"),
                f"is cpu, but {path} ({policy.model_type}) has {lack}; use device=cuda",
            )

    most = config.max_row_tokens if policy.indexer is None else policy.indexer.topk
    if config.device is Device.cpu and config.max_row_tokens > most:
        yield Finding(
            ("device", "rollout.engine", *config.length_keys),
            f"is cpu, and rows may have {config.max_row_tokens} tokens, but SGLang has sparse attention on "
            f"GPUs only: on a CPU it serves rows of at most index_topk {counted(most, 'token')} of {path} "
            f"({policy.model_type}), which need none; use device=cuda, or shorter rows",
        )

    given = config.rollout.sglang.server_args.get(ATTENTION_GROUPS)
    # Another rule refuses a number that does not divide the ranks.
    groups = given if isinstance(given, int) and given > 0 and tensor % given == 0 else 1
    for kind in kinds:
        is_grouped = kind.has_groups and groups > 1
        ranks = tensor // groups if is_grouped else tensor
        of_group = f" / attn_dp_size {groups}" if is_grouped else ""
        for field, letter in kind.shared_out:
            if sizes[letter] % ranks:
                yield Finding(
                    (_TP,),
                    f"{field} {sizes[letter]} of {path} does not divide by tensor_parallel_size {tensor}"
                    f"{of_group}; use {either(nearest_divisors(sizes[letter], ranks))}",
                )

        # More heads than ranks are divided; fewer are replicated.
        for field, letter in kind.replicable:
            heads = sizes[letter]
            if heads % ranks and ranks % heads:
                yield Finding(
                    (_TP,),
                    f"{field} {heads} of {path} is neither a multiple nor a divisor of tensor_parallel_size "
                    f"{tensor}{of_group}; use {either(nearest_divisors(heads, ranks))}, or a multiple of "
                    f"{heads}",
                )


def generation_ahead(config: PPOConfig) -> Findings:
    staleness = config.rollout.max_staleness
    algorithm = config.algorithm
    placement = config.placement

    # The rules below apply to samples of older weights, which exist only with staleness.
    if not staleness:
        return
    correction = algorithm.rollout_correction

    # In a custom placement, any role with devices in the rollout's pool shares those of the engines in time.
    pool = placement.roles.get("rollout") if placement.strategy is PlacementStrategy.custom else None
    others = sorted(
        role
        for role, other in placement.roles.items()
        if role not in ("rollout", *WITHOUT_DEVICES) and other == pool and pool is not None
    )

    whom = ", ".join(others) or "the actor"
    yield from conflicts(
        "rollout.max_staleness",
        f"is {staleness}",
        (
            ("algorithm.rollout_correction.level",),
            correction.level is CorrectionLevel.none and not correction.bypass,
            ", so samples come from older weights than the trained ones, and no correction is enabled; use "
            "algorithm.rollout_correction.level=token (truncated importance weights) or sequence, or "
            "rollout_correction.bypass=true",
        ),
        (
            ("placement.strategy",),
            placement.strategy in (PlacementStrategy.hybrid, PlacementStrategy.fully_collocate)
            or bool(others),
            ", so the engines generate while the other roles train, but in this placement they share devices "
            f"with {whom}; use split_collocate or stand_alone, or max_staleness=0",
        ),
        (
            ("algorithm.dynamic_sampling.enabled", "reward.model.path"),
            algorithm.dynamic_sampling.enabled and config.reward.model.path is not None,
            ": dynamic sampling needs the scores of each prompt as soon as its samples are finished, but a "
            "reward model scores whole steps; use reward functions only, dynamic_sampling.enabled=false, or "
            "max_staleness=0",
        ),
    )


def stages(config: PPOConfig) -> Findings:
    """Check what a run cannot combine with pipeline stages."""
    rollout = config.rollout
    stages = rollout.pipeline_parallel_size
    if stages == 1 or not rollout.engine.needs.cuts_models:
        return  # rollout.whole_model refuses stages of other engines

    yield from conflicts(
        _PP,
        f"is {stages}, but ",
        (
            ("rollout.max_staleness", "rollout.on_update"),
            rollout.max_staleness > 0 and rollout.on_update is not OnUpdate.drain,
            "SGLang pauses only one of the micro-batches that its stages have in flight (samples would "
            "continue while weights change); use rollout.on_update=drain, max_staleness=0, or "
            "pipeline_parallel_size=1",
        ),
        (
            (f"{SECTION}.{ALGORITHM}",),
            rollout.sglang.server_args.get(ALGORITHM) is not None,
            f"SGLang decodes speculatively in engines of one stage only; remove {ALGORITHM}, or "
            "pipeline_parallel_size=1",
        ),
        (
            ("actor.lora.sync",),
            config.actor.served_adapters is not None,
            "engines with several stages get adapters merged only; use actor.lora.sync=merged, or "
            "pipeline_parallel_size=1",
        ),
        (
            ("engine.routing_replay",),
            config.engine.routing_replay is RoutingReplay.rollout,
            "SGLang's first stage, which answers requests, has the routes of its own layers only; use "
            "engine.routing_replay=trainer, or pipeline_parallel_size=1",
        ),
        (
            ("rollout.dtype",),
            rollout.dtype is EngineDType.fp8,
            "megarl has no test of FP8 in engines with several stages; use rollout.dtype=model, or "
            "pipeline_parallel_size=1",
        ),
    )


def stages_fit_model(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that SGLang can distribute the model over the stages."""
    stages = config.rollout.pipeline_parallel_size
    if stages == 1 or not config.rollout.engine.needs.cuts_models:
        return

    path = config.model.path
    support = FAMILIES[policy.model_type].sglang_stages
    able = ", ".join(name for name, family in FAMILIES.items() if family.sglang_stages is not None)
    yield from refusals(
        (
            (_PP,),
            support is None,
            f"is {stages}, but {path} is of the family {policy.model_type}, which SGLang or megarl does not "
            f"support in stages; use 1 and a larger tensor_parallel_size. Supported: {able}",
        ),
        (
            (_PP,),
            policy.tie_word_embeddings and support not in (None, SGLangStages.ties),
            f"is {stages}, but {path} ({policy.model_type}) ties its output layer to the embedding, which "
            "the last stage of SGLang's class lacks; use 1",
        ),
        (
            (_PP,),
            policy.num_hidden_layers < stages,
            f"is {stages}, but {path} has {counted(policy.num_hidden_layers, 'layer')}, and each stage "
            f"needs one; use {policy.num_hidden_layers} or fewer",
        ),
    )
