"""Rules for engines with pipeline stages (`rollout.pipeline_parallel_size` above 1)."""

from __future__ import annotations

from megarl.config.finding import Finding, Findings
from megarl.config.schema import EngineDType, OnUpdate, PPOConfig, RoutingReplay
from megarl.config.speculation import ALGORITHM, SECTION
from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES

_PP = "rollout.pipeline_parallel_size"


def run(config: PPOConfig) -> Findings:
    """Check what a run cannot combine with pipeline stages."""
    rollout = config.rollout
    stages = rollout.pipeline_parallel_size
    if stages == 1 or not rollout.engine.needs.cuts_models:
        return  # rollout.whole_model refuses stages of other engines

    if rollout.max_staleness and rollout.on_update is not OnUpdate.drain:
        yield Finding(
            (_PP, "rollout.max_staleness", "rollout.on_update"),
            f"is {stages}, but SGLang pauses only one of the micro-batches that its stages have in flight "
            "(samples would continue while weights change); use rollout.on_update=drain, max_staleness=0, or "
            "pipeline_parallel_size=1",
        )
    if rollout.sglang.server_args.get(ALGORITHM) is not None:
        yield Finding(
            (_PP, f"{SECTION}.{ALGORITHM}"),
            f"is {stages}, but SGLang decodes speculatively in engines of one stage only; use "
            f"pipeline_parallel_size=1, or remove {ALGORITHM}",
        )
    if config.actor.served_adapters is not None:
        yield Finding(
            (_PP, "actor.lora.sync"),
            f"is {stages}, but engines with several stages get adapters merged only; use "
            "actor.lora.sync=merged, or pipeline_parallel_size=1",
        )
    if config.engine.routing_replay is RoutingReplay.rollout:
        yield Finding(
            (_PP, "engine.routing_replay"),
            f"is {stages}, but SGLang's first stage, which answers requests, has the routes of its own "
            "layers only; use engine.routing_replay=trainer, or pipeline_parallel_size=1",
        )
    if rollout.dtype is EngineDType.fp8:
        yield Finding(
            (_PP, "rollout.dtype"),
            f"is {stages}, but megarl has no test of FP8 in engines with several stages; use "
            "rollout.dtype=model, or pipeline_parallel_size=1",
        )


def fit_model(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that SGLang can distribute the model over the stages."""
    stages = config.rollout.pipeline_parallel_size
    if stages == 1 or not config.rollout.engine.needs.cuts_models:
        return

    path = config.model.path
    support = FAMILIES[policy.model_type].sglang_stages
    if support is None:
        able = ", ".join(name for name, family in FAMILIES.items() if family.sglang_stages is not None)
        yield Finding(
            (_PP,),
            f"is {stages}, but {path} is of the family {policy.model_type}, which SGLang or megarl does not "
            f"support in stages; use 1 and a larger tensor_parallel_size. Supported: {able}",
        )
    elif policy.tie_word_embeddings and not support.ties:
        yield Finding(
            (_PP,),
            f"is {stages}, but {path} ({policy.model_type}) ties its output layer to the embedding, which "
            "the last stage of SGLang's class lacks; use 1",
        )
    if policy.num_hidden_layers < stages:
        yield Finding(
            (_PP,),
            f"is {stages}, but {path} has {counted(policy.num_hidden_layers, 'layer')}, and each stage "
            f"needs one; use {policy.num_hidden_layers} or fewer",
        )
