"""Choose the transport of weights from the trainer to the engines, from the configuration and the plan.

The choice is pure, and the same on a CPU and on CUDA.
"""

from __future__ import annotations

from megarl.config.schema import EngineDType, PPOConfig, RunConfig, Transport
from megarl.config.speculation import DRAFT, SECTION, draft_of
from megarl.machine.errors import ConfigError
from megarl.placement.placement_plan import PlacementPlan

_KEY = "resharding.transport"
_DELTA = "resharding.delta"


def choose_transport(config: PPOConfig, plan: PlacementPlan) -> Transport:
    """Return `resharding.transport`; for auto, the first of device, group and folder that works.

    Raises:
        ConfigError: The configured transport cannot work in this placement, no transport can send FP8, the
            transport cannot send only what changed (`resharding.delta`), or it would overwrite a draft model.
    """
    chosen = _working_transport(config, plan)

    if chosen is Transport.folder and draft_of(config.rollout) is not None:
        problem = (
            f"{_KEY}, {SECTION}.{DRAFT}, placement.strategy: the transport is a folder, which SGLang would "
            f"load into the draft model, too; use {_KEY}=auto in a placement in which all engines run on "
            "devices of the actor, or none does, or NGRAM, which has no draft model"
        )
        raise ConfigError("placement", [problem])

    if config.resharding.delta and chosen is Transport.device:
        how = "chosen" if config.resharding.transport is Transport.auto else "configured"
        problem = (
            f"{_DELTA}, {_KEY}, placement.strategy: is true, but weights do not leave their device with the "
            f"transport device, which is {how} in the placement {plan.strategy.value!r}; use {_DELTA}=false, "
            f"or {_KEY}=group with engines on their own devices"
        )
        raise ConfigError("placement", [problem])

    return chosen


def _working_transport(config: PPOConfig, plan: PlacementPlan) -> Transport:
    asked = config.resharding.transport
    why_not = {
        transport: _why_not(transport, plan)
        for transport in (Transport.device, Transport.group, Transport.folder)
    }
    # The folder always works, so the list is never empty.
    working = [transport for transport, reason in why_not.items() if reason is None]
    if asked is Transport.auto:
        if working[0] is Transport.folder and config.rollout.dtype is EngineDType.fp8:
            reasons = "; ".join(f"{each.value}: {reason}" for each, reason in why_not.items() if reason)
            problem = (
                f"{_KEY}, rollout.dtype, placement.strategy: is auto, and only a folder works, which has the "
                f"dtype of the model, but rollout.dtype is fp8 ({reasons}); use another placement, or "
                "rollout.dtype=model"
            )
            raise ConfigError("placement", [problem])
        return working[0]

    if (reason := why_not[asked]) is not None:
        others = " or ".join(transport.value for transport in working)
        raise ConfigError(
            "placement",
            [f"{_KEY}, placement.strategy: is {asked.value}, but {reason}; use {others}, or auto"],
        )

    return asked


def joins_weight_groups(config: RunConfig, plan: PlacementPlan) -> bool:
    """Return whether actor ranks and engines join process groups (`resharding.transport=group`)."""
    if not isinstance(config, PPOConfig) or not {"actor", "rollout"} <= set(plan.roles):
        return False
    return choose_transport(config, plan) is Transport.group


def _why_not(transport: Transport, plan: PlacementPlan) -> str | None:
    """Return why a transport does not work, None if it does. The folder always works."""
    trainers = plan.group_of("actor").devices
    engines = plan.group_of("rollout").devices

    if transport is Transport.device and (alone := sorted(engines - trainers)):
        places = ", ".join(f"{device} of node {node}" for node, device in alone[:4])
        return (
            f"in the placement {plan.strategy.value!r} engines run on devices that have no actor rank "
            f"(device {places})"
        )

    if transport is Transport.group and (shared := sorted(engines & trainers)):
        node, device = shared[0]
        return (
            f"actor and rollout share devices (device {device} of node {node}), and NCCL does not allow a "
            f"group with two members on one device"
        )

    return None
