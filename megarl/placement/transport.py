"""Which way the weights take from the trainer to the engines: a pure choice, made from the configuration and the plan."""

from __future__ import annotations

from megarl.config.errors import ConfigError
from megarl.config.schema import Device, PPOConfig, Transport
from megarl.placement.plan import PlacementPlan

_KEY = "resharding.transport"


def choose_transport(config: PPOConfig, plan: PlacementPlan, device: Device) -> Transport:
    """`resharding.transport`, or where it is auto the first that works of colocated, broadcast, disk. `device`: cpu or cuda.

    Raises ConfigError for one that cannot work in this placement.
    """
    asked = config.resharding.transport
    why_not = {transport: _why_not(transport, plan, device) for transport in (Transport.colocated, Transport.broadcast, Transport.disk)}
    working = [transport for transport, reason in why_not.items() if reason is None]
    if asked is Transport.auto:
        return working[0]
    if (reason := why_not[asked]) is not None:
        others = " or ".join(transport.value for transport in working)
        raise ConfigError("placement", [f"{_KEY}, placement.strategy: is {asked.value}, but {reason}; use {others}, or auto"])
    return asked


def transports(config: PPOConfig, plan: PlacementPlan) -> dict[Device, Transport]:
    """As `choose_transport`, of each device that `config.device` may become; raises where it works on none."""
    devices = [Device.cpu, Device.cuda] if config.device is Device.auto else [config.device]
    chosen: dict[Device, Transport] = {}
    problems: list[str] = []
    for device in devices:
        try:
            chosen[device] = choose_transport(config, plan, device)
        except ConfigError as error:
            problems += error.problems
    if not chosen:
        raise ConfigError("placement", list(dict.fromkeys(problems)))
    return chosen


def _why_not(transport: Transport, plan: PlacementPlan, device: Device) -> str | None:
    """None where it works; disk always does."""
    actor, rollout = plan.group_of("actor"), plan.group_of("rollout")
    shares_devices = plan.share_devices("actor", "rollout")
    if transport is Transport.colocated:
        if len(nodes := actor.nodes | rollout.nodes) > 1:
            return f"actor and rollout are on {len(nodes)} nodes, and memory is shared within one"
        if device is Device.cuda and not shares_devices:
            return f"in the placement {plan.strategy.value!r} actor and rollout have no device in common, whose memory CUDA IPC would share"
    if transport is Transport.broadcast and device is Device.cuda and shares_devices:
        return "actor and rollout share devices, and NCCL refuses a group with two members on one device"
    return None
