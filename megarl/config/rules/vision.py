"""Rules for models that read images."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.finding import Finding, Findings, nearest_divisors
from megarl.config.roles import REWARD_MODEL, ModelRole, model_roles
from megarl.config.schema import Device, PPOConfig, RunConfig
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.layers import reads_images, routes_tokens


def fit_layout(_: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that the first stage has the layers that features of images are added to."""
    if not reads_images(architecture):
        return

    if role.lora is not None:
        yield Finding(
            (f"{role.name}.lora.rank",),
            f"is set, but {role.path} ({architecture.model_type}) has a vision tower, with which adapters "
            "are not supported yet; use null",
        )

    parallel = role.parallel
    total = architecture.num_hidden_layers
    needed = architecture.num_image_layers
    num_layers = len(next(iter(parallel.virtual_stages(total)), ()))
    if not 0 < num_layers < needed:
        return

    # A layout gives the first stage its layers; otherwise their number follows from that of the stages.
    if parallel.pipeline_layout is not None:
        keys = ["pipeline_layout"]
        remedy = f"give the first stage at least {counted(needed, 'layer')}"
    else:
        keys = ["pipeline_parallel_size", "virtual_pipeline_parallel_size"]
        remedy = f"use at most {counted(nearest_divisors(total, total // needed)[0], 'stage')}"
    yield Finding(
        tuple(f"{role.parallel_key}.{key}" for key in keys),
        f"the first of {parallel.num_virtual_stages} (virtual) stages has {counted(num_layers, 'layer')} of "
        f"{role.path}, but features of images are added to the first {counted(needed, 'layer')}, which it "
        f"must have; {remedy}",
    )


def packing(config: RunConfig, architectures: Mapping[str, Architecture]) -> Findings:
    """Check that rows are packed, which positions in three axes require."""
    reading = [role for role in model_roles(config) if _reads_images(role, architectures)]
    if reading and not config.engine.packing:
        yield Finding(
            ("engine.packing",),
            f"is false, but {reading[0].path} reads images, whose positions megarl supports in packed rows "
            "only; use true",
        )


def every_role(config: PPOConfig, architectures: Mapping[str, Architecture]) -> Findings:
    """Check that all roles read the images that the policy reads."""
    policy = architectures.get("actor")
    if policy is None or not reads_images(policy):
        return

    for role in model_roles(config):
        if role.name in architectures and not _reads_images(role, architectures):
            what = "a reward model" if role.name == REWARD_MODEL else f"the {role.name}"
            yield Finding(
                (role.path_key,),
                f"{role.path} has no vision tower, so {what} would not see the images that the policy "
                f"{config.model.path} answers about; use a model of the policy's family, or a reward "
                "function",
            )
        elif role.name == REWARD_MODEL:
            yield Finding(
                (role.path_key,),
                f"{role.path} reads images, but conversations are sent to reward models as text; use a "
                "reward function",
            )

    if config.agent.is_used:
        yield Finding(
            ("agent", "model.path"),
            f"{config.model.path} reads images, which requests of episodes do not contain yet; use a model "
            "without a vision tower, or no agent",
        )


def engine_fits(config: PPOConfig, policy: Architecture) -> Findings:
    """Check that the engine can read images on the run's device."""
    is_lacking = config.device is Device.cpu and config.rollout.engine.needs.cuts_models
    if is_lacking and reads_images(policy):
        # Engines that shard no model have no experts.
        other = "device=cuda" if routes_tokens(policy) else "rollout.engine=hf"
        yield Finding(
            ("rollout.engine", "device"),
            f"{config.model.path} reads images, which the engine {config.rollout.engine.name!r} supports on "
            f"CUDA only, because its image processors import compiled kernels; use {other}",
        )


def _reads_images(role: ModelRole, architectures: Mapping[str, Architecture]) -> bool:
    architecture = architectures.get(role.name)
    return architecture is not None and reads_images(architecture)
