"""The arithmetic of batches, from prompts to optimizer steps.

The levels are prompts -> samples -> mini-batches -> rows of a rank -> micro-batches -> optimizer steps. All
functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.memory_sizes import state_bytes
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import MicroBatchConfig, ParallelConfig, PPOConfig, RewardModelConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters


def max_conversation_tokens(model: RewardModelConfig, architecture: Architecture) -> int:
    """Return the maximum tokens of a conversation for the reward model.

    It is the minimum of `max_length`, the model's limit and a micro-batch.
    """
    limits = (
        model.max_length,
        architecture.max_position_embeddings,
        micro_batch_room(model.micro_batch, model.parallel),
    )
    return min(limit for limit in limits if limit is not None)


def rounded_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of a number that is at least `value`."""
    return -(-value // multiple) * multiple


def padded_length(length: int, context_parallel_size: int) -> int:
    """Return the padded length of a sequence: two chunks of equal length per context-parallel rank."""
    return length if context_parallel_size == 1 else rounded_up(length, 2 * context_parallel_size)


def chunks_of_rank(length: int, size: int, rank: int) -> list[range]:
    """Return the tokens of a padded sequence that one of `size` context-parallel ranks has: two chunks."""
    if size == 1:
        return [range(length)]

    # An early chunk, whose tokens see few keys, is paired with a late one, whose tokens see many.
    chunk = length // (2 * size)
    return [range(number * chunk, (number + 1) * chunk) for number in (rank, 2 * size - 1 - rank)]


def micro_batch_room(limit: MicroBatchConfig, parallel: ParallelConfig) -> int | None:
    """Return the token limit of a micro-batch; None if it is limited by rows.

    The limit is that of all context-parallel ranks together, including padding.
    """
    if limit.max_tokens is None:
        return None
    unit = padded_length(1, parallel.context_parallel_size)

    return limit.max_tokens * parallel.context_parallel_size // unit * unit


class Row(NamedTuple):
    """The number of prompt and response tokens of a row.

    Attributes:
        prompt_number: Equal for rows that share their prompt.
    """

    prompt: int
    response: int
    prompt_number: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


def micro_batch_tokens(rows: Sequence[Row], context_parallel_size: int = 1) -> int:
    """Count the tokens of packed rows over their context-parallel ranks.

    The count includes padding, and each shared prompt once.
    """
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.prompt_number].append(row)
    total = 0

    # A prompt that is shared is padded by itself; a single row is padded as one sequence.
    for group in groups.values():
        shared = [group[0].prompt, *(row.response for row in group)] if len(group) > 1 else [group[0].tokens]
        total += sum(padded_length(length, context_parallel_size) for length in shared)

    return total


def rows_of_prompt(config: RunConfig, role: ModelRole) -> int:
    """Return the number of rows that share a prompt's tokens if they are in one micro-batch."""
    shares = config.engine.share_prompts and config.engine.packing and role.reads_policy_tokens
    return config.samples_per_prompt if shares else 1


def rows_of_replica(config: RunConfig, role: ModelRole, *, trains: bool) -> int:
    """Return the rows of the fullest replica, in a mini-batch if the role trains, otherwise in the step."""
    together = config.rows_together
    units = rows_of_pass(config, trains=trains) // together
    return -(-units // role.parallel.data_parallel_size) * together


def rows_of_pass(config: RunConfig, *, trains: bool) -> int:
    """Return the rows of all replicas, in a mini-batch if the role trains, otherwise in the step."""
    return config.samples_per_step // (config.updates_per_pass if trains else 1)


def fullest_micro_batch(
    config: RunConfig, role: ModelRole, architecture: Architecture, *, trains: bool
) -> list[Row]:
    """Return the largest micro-batch.

    It has as many of the longest rows as fit, and one shorter row in the rest of `max_tokens`. Under a row
    limit, no two rows share a prompt (the worst case). Under a token limit, as many rows as possible share
    one.
    """
    longest = longest_row(config, role, architecture)
    most = rows_of_replica(config, role, trains=trains)
    room = micro_batch_room(role.micro_batch, role.parallel)
    size = role.parallel.context_parallel_size

    # A limit in rows: distinct prompts make every row as expensive as it can be.
    if room is None:
        count = min(role.micro_batch.sequences or 1, most)
        return [longest._replace(prompt_number=row) for row in range(whole_units(config, count))]

    # A limit in tokens: fill the budget row by row, with the rows of a prompt next to each other.
    rows: list[Row] = []
    left = room
    together = rows_of_prompt(config, role)
    least = padded_length(1, size)

    for number in range(most):
        prompt_number = number // together
        is_first = number % together == 0
        needed = (
            _room_of_row(longest, together > 1, size) if is_first else padded_length(longest.response, size)
        )
        # The row that no longer fits is shortened to the remaining budget, so that the budget is used up.
        if left < needed:
            # The first row of a prompt also needs room for at least one prompt token.
            if left > least * is_first:
                response = min(longest.response, left - least * is_first)
                rows.append(
                    Row(
                        left - padded_length(response, size) if is_first else longest.prompt,
                        response,
                        prompt_number,
                    )
                )
            break
        rows.append(longest._replace(prompt_number=prompt_number))
        left -= needed

    return rows[: whole_units(config, len(rows))]


def shares_a_prompt(config: RunConfig, role: ModelRole, rows: Sequence[Row]) -> bool:
    """Return whether two rows of a micro-batch have their prompt in common."""
    return rows_of_prompt(config, role) > 1 and len({row.prompt_number for row in rows}) < len(rows)


def fullest_with_shared_prompt(
    config: RunConfig, role: ModelRole, architecture: Architecture, *, trains: bool
) -> list[Row] | None:
    """Return a micro-batch as large as the largest one, in which two rows share a prompt.

    The result is None if the largest one already has such rows, or no micro-batch can have them.
    """
    rows = fullest_micro_batch(config, role, architecture, trains=trains)
    room = micro_batch_room(role.micro_batch, role.parallel)
    most = min(rows_of_prompt(config, role), rows_of_replica(config, role, trains=trains))
    if most == 1 or shares_a_prompt(config, role, rows):
        return None
    # A limit in rows: two share a prompt, and the others have prompts of their own (the worst case).
    if room is None:
        return [rows[1], *rows[1:]] if len(rows) > 1 else None

    # A limit in tokens: two responses fill what the prompt leaves.
    size = role.parallel.context_parallel_size
    longest = longest_row(config, role, architecture)
    left = (room - padded_length(longest.prompt, size)) // 2
    response = min(longest.response, left - left % padded_length(1, size))
    return [longest._replace(response=response)] * 2 if response > 0 else None


def whole_units(config: RunConfig, num_rows: int) -> int:
    """Return how many of `num_rows` rows are in whole units of rows that stay together."""
    return num_rows // config.rows_together * config.rows_together


def room_of_longest_row(config: RunConfig, role: ModelRole) -> int:
    """Return the number of tokens that the policy's longest row takes in a micro-batch, including padding.

    Rows that stay together take room together.
    """
    shares = rows_of_prompt(config, role) > 1
    size = role.parallel.context_parallel_size
    return _room_of_unit(_row_of_policy(config), shares, size, config.rows_together)


def _room_of_unit(row: Row, shares_prompt: bool, context_parallel_size: int, rows_together: int) -> int:
    """Return the padded tokens of equal rows that stay together. They share their prompt if rows do."""
    other = padded_length(row.response if shares_prompt else row.tokens, context_parallel_size)
    return _room_of_row(row, shares_prompt, context_parallel_size) + (rows_together - 1) * other


def _room_of_row(row: Row, shares_prompt: bool, context_parallel_size: int) -> int:
    """Return the padded tokens of a row.

    If the row may share its prompt, prompt and response are padded separately.
    """
    parts = (row.prompt, row.response) if shares_prompt else (row.tokens,)
    return sum(padded_length(part, context_parallel_size) for part in parts)


def longest_row(config: RunConfig, role: ModelRole, architecture: Architecture) -> Row:
    """Return the longest row that a model reads, in the model's own tokens."""
    if isinstance(config, PPOConfig) and not role.reads_policy_tokens:
        # A reward model's score is read at the last token.
        return Row(max_conversation_tokens(config.reward.model, architecture) - 1, 1)
    return _row_of_policy(config)


def _row_of_policy(config: RunConfig) -> Row:
    return Row(config.longest_prompt, config.longest_response)


def optimizer_steps_per_step(config: RunConfig, role: ModelRole) -> int:
    if role.optim is None:
        return 0
    return config.updates_per_pass * config.passes_per_step


def optimizer_steps(config: RunConfig, role: ModelRole) -> int:
    """Return the number of optimizer steps of the whole run, where the learning rate's decay ends."""
    steps = config.trainer.total_steps
    # The first steps may train only the critic.
    if isinstance(config, PPOConfig) and role.name == "actor":
        steps -= config.trainer.critic_warmup_steps
    return steps * optimizer_steps_per_step(config, role)


def micro_batches(
    rows: int, role: ModelRole, longest: Row, multiple_of: int, rows_of_prompt: int, rows_together: int = 1
) -> tuple[int, int]:
    """Return the minimum and maximum number of micro-batches for `rows` rows.

    An interleaved pipeline runs a multiple of its stages (`multiple_of`), padded with empty micro-batches.
    The maximum is reached if no two rows share a prompt.
    """
    room = micro_batch_room(role.micro_batch, role.parallel)
    size = role.parallel.context_parallel_size

    if room is None:
        assert role.micro_batch.sequences is not None
        least = most = -(-rows // role.micro_batch.sequences)
    else:
        # A row has at least one response token, and a prompt at least one token.
        fewest = rows * padded_length(2, size)
        if rows_of_prompt > 1:
            fewest = (rows + -(-rows // rows_of_prompt)) * padded_length(1, size)
        # Maximum: every row has the maximum length, and a micro-batch contains whole rows only.
        of_unit = _room_of_unit(longest, rows_of_prompt > 1, size, rows_together)
        least = -(-fewest // room)
        most = -(-(rows // rows_together) // (room // of_unit))

    return rounded_up(least, multiple_of), rounded_up(most, multiple_of)


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


def work_of_roles(config: RunConfig, architectures: Mapping[str, Architecture]) -> list[RoleArithmetic]:
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
