"""The section of recovery from lost trainer processes."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema.keys import ranged


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How a run continues after it loses a process of a trained model.

    The lost process and its peers are started again with a snapshot in host memory, and repeat the steps
    since then. The result is bitwise identical to that of a run which lost nothing.
    """

    # restart lost trainer processes; false: the run ends, and the same command resumes from a checkpoint
    enabled: bool = False
    # steps between snapshots of the training state in host memory; the samples of these steps are kept, too
    snapshot_every_steps: int = ranged(1, at_least=1)
    max_restarts: int = ranged(3, at_least=1)  # recoveries within `window_steps` steps; one more ends the run
    # how long a run that lost a node waits until the cluster has another free one, in seconds
    wait_for_node_s: float = ranged(300.0, at_least=0)
    # when a node is lost and no other is free, continue with fewer data-parallel replicas instead of waiting;
    # results then equal those of the undisturbed run only up to rounding
    allow_fewer_replicas: bool = False
    window_steps: int = ranged(10, at_least=1)  # steps over which `max_restarts` counts
    # optimizer steps between bitwise comparisons of weights that several ranks hold; a rank whose copy
    # differs counts as lost; 0: never
    check_replicas_every: int = ranged(0, at_least=0)
    # a call of a model that takes longer than this multiple of the median of its earlier calls, and than
    # 10 s, counts as hung; 0: only `trainer.phase_time_limit_s` applies
    hang_factor: float = ranged(0.0, at_least=0)
    # a rank that takes longer than this multiple of its peers' time for the same small computation, in each
    # of eight updates in a row, is reported as slow; 0: never
    straggler_factor: float = ranged(1.5, at_least=0)
