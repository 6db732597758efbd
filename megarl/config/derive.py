"""Derives the numbers of a configuration (batches, steps, memory) for `megarl check` and the report.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.batch_arithmetic import (
    longest_row,
    micro_batches,
    optimizer_steps,
    optimizer_steps_per_step,
    rows_of_pass,
    rows_of_prompt,
    rows_of_replica,
    whole_units,
)
from megarl.config.memory_sizes import state_bytes
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters


@dataclass(frozen=True, kw_only=True)
class RoleArithmetic:
    """The work of one model in one step. Ranges are (minimum, maximum).

    Attributes:
        mini_batch_rows: Rows of one optimizer step over all replicas; for a model that only infers, all rows
            of the step.
        rows_per_replica: Rows of a mini-batch per replica. The ends differ if the rows do not divide evenly.
        micro_batches: Micro-batches of the fullest replica in a mini-batch, from all rows having minimum
            length to all rows having maximum length.
        state_bytes_per_rank: Bytes of weights, gradients and optimizer state, with parameters sharded evenly.
            Activations are not included.
    """

    role: str
    num_parameters: int
    num_ranks: int
    num_replicas: int
    mini_batch_rows: int
    rows_per_replica: tuple[int, int]
    micro_batches: tuple[int, int]
    optimizer_steps_per_step: int
    optimizer_steps_total: int
    state_bytes_per_rank: int


def derive(config: RunConfig, architectures: Mapping[str, Architecture]) -> list[RoleArithmetic]:
    """Return the work of each model role of a valid configuration.

    Args:
        config: A valid configuration.
        architectures: The architecture of each of `model_roles(config)`, by the role's name.
    """
    return [_role(config, role, architectures[role.name]) for role in model_roles(config)]


def _role(config: RunConfig, role: ModelRole, architecture: Architecture) -> RoleArithmetic:
    trains = role.optim is not None
    rows = rows_of_pass(config, trains=trains)
    replicas = role.parallel.data_parallel_size
    # Rows may not divide evenly, so the fullest replica determines the number of micro-batches.
    fullest = rows_of_replica(config, role, trains=trains)

    return RoleArithmetic(
        role=role.name,
        num_parameters=num_parameters(architecture, with_value_head=role.with_value_head),
        num_ranks=role.parallel.world_size,
        num_replicas=replicas,
        mini_batch_rows=rows,
        rows_per_replica=(whole_units(config, rows // replicas), fullest),
        micro_batches=micro_batches(
            fullest,
            role,
            longest_row(config, role, architecture),
            role.parallel.micro_batch_multiple,
            rows_of_prompt(config, role),
            config.rows_together,
        ),
        optimizer_steps_per_step=optimizer_steps_per_step(config, role),
        optimizer_steps_total=optimizer_steps(config, role),
        state_bytes_per_rank=state_bytes(config.model.dtype, role, architecture),
    )
