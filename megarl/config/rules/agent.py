"""Rules for runs with tools or an environment."""

from __future__ import annotations

from megarl.config.schema import PPOConfig
from megarl.config.violation import Violation, Violations


def episodes(config: PPOConfig) -> Violations:
    agent = config.agent
    if agent.tools and agent.environment.path is not None:
        yield Violation(
            ("agent.tools", "agent.environment.path"),
            "both are set, but an environment answers the model itself, so tools would not be used; remove "
            "one of them",
        )

    if agent.parser is not None and not agent.tools:
        yield Violation(
            ("agent.parser", "agent.tools"),
            f"parser is {agent.parser!r}, but there are no tools whose calls it could parse; use null (an "
            f"environment receives the text of a turn)",
        )

    # The remaining rules apply to turns, which only episodes have.
    if not agent.is_used:
        return
    most = config.data.max_response_length

    if agent.max_turn_tokens is not None and agent.max_turn_tokens > most:
        yield Violation(
            ("agent.max_turn_tokens", "data.max_response_length"),
            f"max_turn_tokens {agent.max_turn_tokens} is above max_response_length {most}, the limit of all "
            f"turns together; use {most} or less",
        )

    if config.rollout.validation.min_new_tokens:
        yield Violation(
            ("agent", "rollout.validation.min_new_tokens"),
            f"min_new_tokens is {config.rollout.validation.min_new_tokens}, but the last turn of an episode "
            f"may have room for fewer; use 0",
        )
