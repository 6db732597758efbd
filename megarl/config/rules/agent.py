"""Rules for runs with tools, an environment or a harness, and for the images of sandboxes."""

from __future__ import annotations

import os
import re

from megarl.config.finding import Finding, Findings, conflicts, refusals
from megarl.config.schema import HarnessConfig, PPOConfig, SandboxProvider

# A name, with a registry, a tag and a digest; or the start of an image's hash.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")


def episodes(config: PPOConfig) -> Findings:
    agent = config.agent
    environment = agent.environment
    if agent.tools and (environment.path is not None or environment.hub is not None):
        yield Finding(
            ("agent.tools", "agent.environment"),
            "both are set, but an environment answers the model itself, so tools would not be used; remove "
            "one of them",
        )

    yield from refusals(
        (
            ("agent.environment.path", "agent.environment.hub"),
            environment.path is not None and environment.hub is not None,
            "both are set, but an episode has one environment; set one of them to null",
        ),
        (
            ("agent.environment.name", "agent.environment.hub"),
            environment.hub is not None and not environment.name,
            "name is null, so there is no environment; give its name on the hub",
        ),
    )

    if agent.has_program:
        yield from _harness(config)

    # The remaining rules apply to turns, which only episodes have.
    if not agent.is_used:
        return
    most = config.data.max_response_length
    yield from refusals(
        (
            ("agent.max_turn_tokens", "data.max_response_length"),
            agent.max_turn_tokens is not None and agent.max_turn_tokens > most,
            f"max_turn_tokens {agent.max_turn_tokens} is above max_response_length {most}, the limit of all "
            f"turns together; use {most} or less",
        ),
        (
            ("agent", "rollout.validation.min_new_tokens"),
            config.rollout.validation.min_new_tokens != 0,
            f"min_new_tokens is {config.rollout.validation.min_new_tokens}, but the last turn of an episode "
            f"may have room for fewer; use 0",
        ),
    )


def _harness(config: PPOConfig) -> Findings:
    """Check what an agent program cannot be combined with. Its episodes have any number of rows."""
    agent = config.agent
    section = "agent.harness" if agent.harness.is_used else "agent.environment.hub"
    what = "a harness" if agent.harness.is_used else "a hub"
    kinds = {
        "agent.harness.command": bool(agent.harness.command),
        "agent.harness.function": agent.harness.function is not None,
        "agent.harness.external": agent.harness.external,
    }

    used = tuple(key for key, is_set in kinds.items() if is_set)
    yield from refusals(
        (used, len(used) > 1, "are set together, but an episode is run by one of them; remove the others"),
        (
            ("agent.harness.external", "agent.num_workers"),
            (agent.harness.external or agent.harness.port is not None) and agent.num_workers > 1,
            f"num_workers is {agent.num_workers}, but clients elsewhere need one address; use 1",
        ),
        (
            ("agent.harness.external", "agent.harness.port"),
            agent.harness.external and agent.harness.port is None,
            "port is null, so clients would not know where to claim episodes; choose one, such as 8100",
        ),
    )
    yield from _sandbox(agent.harness)
    has_environment = agent.environment.path is not None or agent.environment.hub is not None
    if agent.harness.is_used and (agent.tools or has_environment):
        yield Finding(
            ("agent.harness", "agent.tools" if agent.tools else "agent.environment"),
            "both are set, but the program of a harness brings its own tools; remove one of them",
        )

    algorithm = config.algorithm
    yield from conflicts(
        section,
        f"an episode of {what} has any number of rows, and ",
        (
            ("algorithm.dynamic_sampling.enabled",),
            algorithm.dynamic_sampling.enabled,
            "groups of such episodes cannot be filtered yet; use false",
        ),
        (
            ("algorithm.overlong.buffer_share",),
            algorithm.overlong.buffer_share > 0,
            "the penalty would apply to each row; use 0",
        ),
        (
            ("algorithm.advantage.estimator",),
            algorithm.advantage.estimator.needs.greedy_baseline,
            "its baseline needs one row per episode; use grpo or another estimator",
        ),
        (
            ("reward.model.path",),
            config.reward.model.path is not None,
            "a reward model reads one conversation per episode; use reward functions, or have the program "
            "set the reward",
        ),
    )


def _sandbox(harness: HarnessConfig) -> Findings:
    sandbox = harness.sandbox
    section = "agent.harness.sandbox"

    if sandbox.provider is not None and harness.external:
        yield Finding(
            (f"{section}.provider", "agent.harness.external"),
            "both are set, but agents elsewhere start their own sandboxes; use provider: null",
        )
    if sandbox.provider is None or sandbox.image is None:
        return
    if problem := image_problem(sandbox.provider, sandbox.image):
        yield Finding((f"{section}.image", f"{section}.provider"), problem)


def image_problem(provider: SandboxProvider, image: object) -> str | None:
    """Return why a value cannot be an image, and what to use; None if it can be one."""
    if not isinstance(image, str):
        return f"is {image!r}, of type {type(image).__name__}; give a string, or null"
    if provider is SandboxProvider.container:
        if _IMAGE.fullmatch(image):
            return None
        return f"is {image!r}, which is no name of an image; use one such as docker.io/library/python:3.12"
    if not image.startswith("/"):
        return f"is {image!r}, but with local it is the absolute path of a folder"
    if os.path.realpath(image) == "/":
        return (
            f"is {image!r}, so that programs could read all files of this machine; use the folder of another "
            "file system, or null for the system and Python of the machine without its other files"
        )
    return None
