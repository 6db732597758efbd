"""The range of each number in the schema that has one, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple


class Range(NamedTuple):
    """[low, high], without an end that is `open`."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        if self == FINITE:
            return "a finite number"
        if self.high == math.inf:
            return f"{'above' if self.low_open else 'at least'} {self.low:g}"
        return f"in {'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"


FINITE = Range()
COUNT = Range(low=1)
NOT_NEGATIVE = Range(low=0)
POSITIVE = Range(low=0, low_open=True)
SHARE = Range(low=0, high=1)
NUCLEUS = Range(low=0, high=1, low_open=True)
MOMENTUM = Range(low=0, high=1, high_open=True)

# The last parts of dotted keys; the longest that fits a key holds. A list's elements and null have no key here.
RANGES = {
    "max_prompt_length": COUNT,
    "max_response_length": COUNT,
    "max_length": COUNT,
    "seed": NOT_NEGATIVE,
    "gamma": SHARE,
    "lam": SHARE,
    "policy_loss.clip_low": Range(low=0, high=1, low_open=True, high_open=True),
    "policy_loss.clip_high": POSITIVE,
    "policy_loss.norm_tokens": COUNT,
    "sapo.temperature_positive": POSITIVE,
    "sapo.temperature_negative": POSITIVE,
    "covariance.share": NUCLEUS,
    "covariance.low": FINITE,
    "covariance.high": FINITE,
    "covariance.kl_coefficient": NOT_NEGATIVE,
    "policy_loss.clip_dual": Range(low=1, low_open=True),
    "value_loss.clip": POSITIVE,
    "kl.coefficient": NOT_NEGATIVE,
    "kl.controller.target": POSITIVE,
    "kl.controller.horizon": COUNT,
    "entropy_coefficient": FINITE,
    "rollout_correction.low": NOT_NEGATIVE,
    "rollout_correction.high": POSITIVE,
    "rejection.low": FINITE,
    "rejection.high": POSITIVE,
    "overlong.buffer_share": SHARE,
    "overlong.penalty": POSITIVE,
    "dynamic_sampling.max_generations": COUNT,
    "tensor_parallel_size": COUNT,
    "pipeline_parallel_size": COUNT,
    "virtual_pipeline_parallel_size": Range(low=2),
    "data_parallel_size": COUNT,
    "lr": POSITIVE,
    "eps": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "clip_grad": NOT_NEGATIVE,
    "warmup_steps": NOT_NEGATIVE,
    "min_lr": NOT_NEGATIVE,
    "micro_batch.sequences": COUNT,
    "micro_batch.max_tokens": COUNT,
    "reward.model.weight": FINITE,
    "reward.model.max_length": COUNT,
    "time_limit_s": POSITIVE,
    "max_error_rate": SHARE,
    "num_processes": COUNT,
    "num_replicas": COUNT,
    "n": COUNT,
    "temperature": NOT_NEGATIVE,
    "top_p": NUCLEUS,
    "min_new_tokens": NOT_NEGATIVE,
    "max_concurrency": COUNT,
    "restart_limit": NOT_NEGATIVE,
    "health_limit_s": POSITIVE,
    "num_nodes": COUNT,
    "devices_per_node": COUNT,
    "device_memory_gb": POSITIVE,
    "bucket_mb": POSITIVE,
    "max_log_prob_difference": POSITIVE,
    "log_prob_chunk_tokens": COUNT,
    "total_steps": COUNT,
    "prompts_per_step": COUNT,
    "samples_per_step": COUNT,
    "updates_per_step": COUNT,
    "epochs_per_batch": COUNT,
    "critic_warmup_steps": NOT_NEGATIVE,
    "validate_every_steps": NOT_NEGATIVE,
    "phase_time_limit_s": POSITIVE,
    "log_generations": NOT_NEGATIVE,
    "checkpoint.every_steps": NOT_NEGATIVE,
    "checkpoint.keep": NOT_NEGATIVE,
}


def range_of(key: str) -> Range | None:
    parts = key.split(".")
    return next((RANGES[tail] for start in range(len(parts)) if (tail := ".".join(parts[start:])) in RANGES), None)


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value under a configuration with its dotted key; a list is one value."""
    for entry in fields(section):
        value, key = getattr(section, entry.name), f"{prefix}{entry.name}"
        if is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value
