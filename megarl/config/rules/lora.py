"""Rules for low-rank adapters: their options, the models that can have them, and the layers they need."""

from __future__ import annotations

from megarl.config.finding import Finding, Findings, conflicts, refusals
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import (
    Layers,
    LoRAConfig,
    LoRASync,
    PlacementStrategy,
    PPOConfig,
    RunConfig,
)
from megarl.models.adapters import (
    FEED_FORWARD_PROJECTIONS,
    OUTPUT_MODULE,
    SAVED_MODULES,
    SERVED_PROJECTIONS,
    adapter_problems,
    available_targets,
)
from megarl.models.architecture import Architecture
from megarl.models.layers import kinds_of
from megarl.models.mapping import MIXER
from megarl.models.tensor_table import rows_of


def options(config: RunConfig, role: ModelRole) -> Findings:
    """Check the options of a role's adapters, without its model."""
    if role.optim is None:
        return

    settings = config.trained_models[role.name].lora
    key = f"{role.name}.lora"
    yield from _saved_modules(settings, role, f"{key}.modules_to_save")

    is_sent = role.name == "actor" and isinstance(config, PPOConfig)
    yield from refusals(
        (
            (f"{key}.sync",),
            settings.sync is LoRASync.adapter and not is_sent,
            "is adapter, but only the actor of an RL run is sent to engines; remove it",
        ),
        (
            (f"{role.name}.experts.bias_update_rate", f"{key}.rank"),
            settings.rank is not None and role.routers.bias_update_rate != 0,
            f"is {role.routers.bias_update_rate:g}, which changes selection biases, but with adapters the "
            "model is frozen; use 0",
        ),
        (
            ("model.sparse_attention.indexer_loss_coefficient", f"{key}.rank"),
            settings.rank is not None and role.indexer_loss != 0,
            f"is {role.indexer_loss:g}, which trains indexers, but with adapters the model is frozen; use 0",
        ),
    )


def _saved_modules(settings: LoRAConfig, role: ModelRole, key: str) -> Findings:
    saved = settings.modules_to_save
    known = " or ".join(SAVED_MODULES)
    yield from refusals(
        *(
            (
                (key,),
                name not in SAVED_MODULES,
                f"{name!r} cannot train in full next to adapters; use {known}",
            )
            for name in saved
        ),
        ((key,), len(set(saved)) < len(saved), f"is [{', '.join(saved)}]; name each module once"),
        (
            (key,),
            role.with_value_head and OUTPUT_MODULE in saved,
            f"has {OUTPUT_MODULE}, but the {role.name} has a value head, which always trains; remove it",
        ),
    )


def reference(config: PPOConfig) -> Findings:
    """Check the settings of a reference that is the actor's model without its adapters."""
    role = next((role for role in model_roles(config) if role.base_of is not None), None)
    if role is None:
        return

    why = f"with {role.base_of}.lora, the {role.name} is the model of {role.base_of} without its adapters"
    own, owners = (config.placement.roles.get(name or "") for name in (role.name, role.base_of))
    yield from refusals(
        (
            ("reference.megatron.transformer", f"{role.base_of}.lora.rank"),
            config.reference.megatron.transformer is not None,
            f"is set, but {why}; remove it, or set reference.path",
        ),
        (
            (f"placement.roles.{role.name}",),
            config.placement.strategy is PlacementStrategy.custom and own != owners,
            f"is {own}, but {why} and runs in its processes; use {owners}, or set reference.path",
        ),
    )


def served(config: PPOConfig) -> Findings:
    """Check that engines can get the adapters separately."""
    if config.actor.served_adapters is None:
        return

    yield from conflicts(
        "actor.lora.sync",
        "is adapter, ",
        (
            ("rollout.engine",),
            not config.rollout.engine.needs.serves_adapters,
            f"but the engine {config.rollout.engine.value} has no adapters; use merged, or "
            "rollout.engine=sglang",
        ),
        (
            ("resharding.transport",),
            config.resharding.transport.needs.through_files,
            "but SGLang's own loader, which reads folders, does not load adapters into a running engine; use "
            "merged, or resharding.transport=auto",
        ),
        (
            ("resharding.delta",),
            config.resharding.delta,
            "so only adapters are sent, of which every element changes; use resharding.delta=false, or "
            "merged",
        ),
    )


def fit_engine(config: PPOConfig, architecture: Architecture) -> Findings:
    """Check that SGLang can apply each adapter of the actor."""
    lora = config.actor.served_adapters
    if lora is None:
        return

    merged_only = [kind for kind in kinds_of(architecture) if not kind.serves_adapters]
    if mixers := [kind.name for kind in merged_only if kind.prefix == MIXER]:
        yield Finding(
            ("actor.lora.sync",),
            f"is adapter, but engines get the adapters of {architecture.model_type}, which has {mixers[0]}, "
            "merged only; use merged",
        )
        return

    for target in lora.targets or available_targets(rows_of(architecture.base, "lm")):
        projection = target.rpartition(".")[2]
        if projection not in SERVED_PROJECTIONS:
            yield Finding(
                ("actor.lora.sync", "actor.lora.targets"),
                f"is adapter, but {projection!r} is not a projection with an adapter that engines can apply "
                f"({', '.join(SERVED_PROJECTIONS)}); use merged",
            )
        elif merged_only and projection in FEED_FORWARD_PROJECTIONS:
            yield Finding(
                ("actor.lora.sync", "actor.lora.targets"),
                f"is adapter, but {projection!r} is also a projection of the experts of "
                f"{architecture.model_type}, whose adapters engines get merged only; use merged, or "
                "actor.lora.targets=[q_proj, k_proj, v_proj, o_proj]",
            )


def fit_model(_: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that the model can have the adapters."""
    lora = architecture.lora
    if lora is None:
        return

    key = f"{role.name}.lora"
    if lora.modules_to_save and architecture.tie_word_embeddings and not role.with_value_head:
        yield Finding(
            (f"{key}.modules_to_save",),
            f"is [{', '.join(lora.modules_to_save)}], but the embedding of {role.path} is also its output "
            "layer (tie_word_embeddings), which adapters do not train in full yet; use [], or train all "
            f"weights ({key}.rank=null)",
        )

    rows = rows_of(architecture.base, "value" if role.with_value_head else "lm")
    for problem in adapter_problems(architecture, rows, lora.targets):
        yield Finding((f"{key}.targets" if problem.startswith("'") else f"{key}.rank",), problem)


def layers_fit(config: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that adapters are not combined with Transformer Engine's layers."""
    if config.engine.layers is Layers.transformer_engine and architecture.lora is not None:
        yield Finding(
            ("engine.layers", f"{role.name}.lora.rank"),
            f"is transformer_engine, but {role.name}.lora adds adapters to local layers only; use auto or "
            "local",
        )
