"""The section of recovery from lost trainer processes."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema.keys import Reader, only_with, ranged

_ENABLED = Reader(".enabled", example="true")


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How a run continues after it loses a process of a trained model.

    The lost process and its peers are started again with a snapshot in host memory, and repeat the steps
    since then. The result is bitwise identical to that of a run which lost nothing.
    """

    # restart lost trainer processes; false: the run ends, and the same command resumes from a checkpoint
    enabled: bool = False
    # steps between snapshots of the training state in host memory; the samples of these steps are kept, too
    snapshot_every_steps: int = only_with(ranged(1, at_least=1), _ENABLED)
    # recoveries within `window_steps` steps; one more ends the run
    max_restarts: int = only_with(ranged(3, at_least=1), _ENABLED)
    # how long a run that lost a node waits until the cluster has another free one, in seconds
    wait_for_node_s: float = only_with(ranged(300.0, at_least=0), _ENABLED)
    # when a node is lost and no other is free, continue with fewer data-parallel replicas instead of waiting;
    # results then equal those of the undisturbed run only up to rounding
    allow_fewer_replicas: bool = only_with(False, _ENABLED)
    # steps over which `max_restarts` counts
    window_steps: int = only_with(ranged(10, at_least=1), _ENABLED)
    # optimizer steps between bitwise comparisons of weights that several ranks hold; a rank whose copy
    # differs counts as lost; 0: never
    check_replicas_every: int = ranged(0, at_least=0)
    # a call of a model that takes longer than this multiple of the median of its earlier calls, and than
    # 10 s, counts as hung; 0: only `trainer.phase_time_limit_s` applies
    hang_factor: float = ranged(0.0, at_least=0)
    # a rank that takes longer than this multiple of its peers' time for the same small computation, in each
    # of eight updates in a row, is reported as slow; 0: never
    straggler_factor: float = ranged(1.5, at_least=0)
