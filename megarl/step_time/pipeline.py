"""The time of a pipeline schedule: one forward, one backward (1F1B), plain or interleaved. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_s(stages_s: Sequence[float], num_micro_batches: int, num_chunks: int = 1) -> float:
    """Return the seconds of a pass of all micro-batches through all stages.

    The slowest stage is never idle between its first and its last micro-batch. Before, the first micro-batch
    passes through the stages above it, and afterwards the last gradients return through them. With virtual
    stages, these passes only have the layers of one chunk (Narayanan et al. 2021, section 2.2).

    Args:
        stages_s: The seconds of each stage for one micro-batch: its forward pass, and its backward pass if it
            trains.
        num_chunks: The number of virtual stages of each stage.
    """
    slowest_s = max(stages_s)
    others_s = sum(stages_s) - slowest_s
    return num_micro_batches * slowest_s + others_s / num_chunks
