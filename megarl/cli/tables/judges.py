"""Prints the prompts that judges get. This module imports torch."""

from __future__ import annotations

from rich.console import Console

from megarl.cli.tables.console import print_line
from megarl.config.schema import PPOConfig
from megarl.doctor.judges import first_sample, prompt
from megarl.rewards.judges import JudgePromptError


def print_judge_prompts(config: PPOConfig, console: Console) -> None:
    """Print the prompt of each judge for the first row of the training data, if both are on this machine."""
    sample = first_sample(config.data) if config.reward.judges else None
    if sample is None:
        return
    for judge in config.reward.judges:
        try:
            text = prompt(judge, sample)
        except JudgePromptError:  # `megarl check` reports it
            continue
        print_line(console, f"prompt of judge {judge.name} for the first row:")
        for line in text.splitlines():
            print_line(console, f"    {line}")
