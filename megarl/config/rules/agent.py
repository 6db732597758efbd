"""What a run must satisfy whose samples are episodes."""

from __future__ import annotations

from megarl.config.schema import PPOConfig
from megarl.config.violation import Violation, Violations


def episodes(config: PPOConfig) -> Violations:
    agent = config.agent
    if agent.tools and agent.environment.path is not None:
        yield Violation(
            ("agent.tools", "agent.environment.path"),
            "both are given, but an environment answers the model itself, so tools would not be used; leave "
            "one of them out",
        )

    if agent.parser is not None and not agent.tools:
        yield Violation(
            ("agent.parser", "agent.tools"),
            f"parser is {agent.parser!r}, but there are no tools whose calls it could read; an environment "
            f"reads a turn's text itself",
        )

    # The remaining rules are about turns, which only episodes have.
    if not agent.is_used:
        return
    most = config.data.max_response_length

    if agent.max_turn_tokens is not None and agent.max_turn_tokens > most:
        yield Violation(
            ("agent.max_turn_tokens", "data.max_response_length"),
            f"max_turn_tokens {agent.max_turn_tokens} is above max_response_length {most}, which is of all "
            f"turns; use {most} or less",
        )

    if config.rollout.validation.min_new_tokens:
        yield Violation(
            ("agent", "rollout.validation.min_new_tokens"),
            f"min_new_tokens is {config.rollout.validation.min_new_tokens}, but the last turn of an episode "
            f"may have room for fewer; use 0",
        )
