"""The arithmetic of batches: prompts -> samples -> mini-batches -> rows of a rank -> micro-batches -> optimizer steps. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import MicroBatchConfig, ParallelConfig, PPOConfig, RewardModelConfig, SFTConfig
from megarl.models.architecture import Architecture


def samples_per_step(config: PPOConfig | SFTConfig) -> int:
    if isinstance(config, SFTConfig):
        return config.trainer.samples_per_step
    return config.trainer.prompts_per_step * config.rollout.n


def updates_per_pass(config: PPOConfig | SFTConfig) -> int:
    """Mini-batches, and so optimizer steps, of one pass over a step's samples."""
    return 1 if isinstance(config, SFTConfig) else config.trainer.updates_per_step


def max_row_tokens(config: PPOConfig | SFTConfig) -> int:
    if isinstance(config, SFTConfig):
        return config.data.max_length
    return config.data.max_prompt_length + config.data.max_response_length


def role_tokens(config: PPOConfig | SFTConfig, role: ModelRole, architecture: Architecture) -> int:
    """Of the longest row that a model reads, in tokens of its own."""
    if isinstance(config, PPOConfig) and not role.reads_policy_tokens:
        return max_conversation_tokens(config.reward.model, architecture)
    return max_row_tokens(config)


def max_conversation_tokens(model: RewardModelConfig, architecture: Architecture) -> int:
    """That the reward model reads: `max_length`, and no more than it has positions, and a micro-batch room."""
    limits = (model.max_length, architecture.max_position_embeddings, micro_batch_room(model.micro_batch, model.parallel))
    return min(limit for limit in limits if limit is not None)


def padded_length(length: int, context_parallel_size: int) -> int:
    """Tokens of a sequence that so many ranks share: each has two chunks of it, all of them equal."""
    return length if context_parallel_size == 1 else -(-length // (2 * context_parallel_size)) * 2 * context_parallel_size


def micro_batch_room(limit: MicroBatchConfig, parallel: ParallelConfig) -> int | None:
    """Tokens of all ranks that share a micro-batch, with what pads them; None where its rows are counted."""
    if limit.max_tokens is None:
        return None
    size, unit = parallel.context_parallel_size, padded_length(1, parallel.context_parallel_size)
    return limit.max_tokens * size // unit * unit


class Row(NamedTuple):
    """Tokens. prompt_number: the same for rows that share their prompt."""

    prompt: int
    response: int
    prompt_number: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


def micro_batch_tokens(rows: Sequence[Row], context_parallel_size: int = 1) -> int:
    """Of packed rows, of all ranks that share them, with what pads them; a prompt that rows share counts once."""
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.prompt_number].append(row)
    total = 0
    for group in groups.values():
        shared = [group[0].prompt, *(row.response for row in group)] if len(group) > 1 else [group[0].tokens]
        total += sum(padded_length(length, context_parallel_size) for length in shared)
    return total


def rows_of_prompt(config: PPOConfig | SFTConfig, role: ModelRole) -> int:
    """That share its tokens where they are in one micro-batch."""
    shares = config.engine.share_prompts and config.engine.packing and role.reads_policy_tokens
    return config.rollout.n if shares and isinstance(config, PPOConfig) else 1


def rows_of_replica(config: PPOConfig | SFTConfig, role: ModelRole, *, trains: bool) -> int:
    """Of the fullest replica: of a mini-batch where the role trains, else of the step."""
    return -(-rows_of_pass(config, trains=trains) // role.parallel.data_parallel_size)


def rows_of_pass(config: PPOConfig | SFTConfig, *, trains: bool) -> int:
    """Of all replicas together."""
    return samples_per_step(config) // (updates_per_pass(config) if trains else 1)


def fullest_micro_batch(config: PPOConfig | SFTConfig, role: ModelRole, architecture: Architecture, *, trains: bool) -> list[Row]:
    """The longest rows, and one shorter row in what `max_tokens` leaves: as many as a micro-batch may hold, and no more than there are.

    Of a limit of rows no two share a prompt, which is the most; in a limit of tokens as many do as can.
    """
    longest = longest_row(config, role, architecture)
    most = rows_of_replica(config, role, trains=trains)
    room, size = micro_batch_room(role.micro_batch, role.parallel), role.parallel.context_parallel_size
    if room is None:
        return [longest._replace(prompt_number=row) for row in range(min(role.micro_batch.sequences or 1, most))]
    rows: list[Row] = []
    left, together, least = room, rows_of_prompt(config, role), padded_length(1, size)
    for number in range(most):
        prompt_number, is_first = number // together, number % together == 0
        needed = _room_of_row(longest, together > 1, size) if is_first else padded_length(longest.response, size)
        if left < needed:
            if left > least * is_first:
                response = min(longest.response, left - least * is_first)
                rows.append(Row(left - padded_length(response, size) if is_first else longest.prompt, response, prompt_number))
            break
        rows.append(longest._replace(prompt_number=prompt_number))
        left -= needed
    return rows


def room_of_longest_row(config: PPOConfig | SFTConfig, role: ModelRole) -> int:
    """Tokens that the longest row of a model which reads those of the policy takes of a micro-batch, with what pads it."""
    longest = _row_of_policy(config)
    return _room_of_row(longest, rows_of_prompt(config, role) > 1, role.parallel.context_parallel_size)


def _room_of_row(row: Row, shares_prompt: bool, context_parallel_size: int) -> int:
    """Prompt and response of a row that may share its prompt are padded each, though it may have nobody to share it with."""
    parts = (row.prompt, row.response) if shares_prompt else (row.tokens,)
    return sum(padded_length(part, context_parallel_size) for part in parts)


def longest_row(config: PPOConfig | SFTConfig, role: ModelRole, architecture: Architecture) -> Row:
    if not role.reads_policy_tokens:
        return Row(role_tokens(config, role, architecture) - 1, 1)  # a reward model's score is read at the last token
    return _row_of_policy(config)


def _row_of_policy(config: PPOConfig | SFTConfig) -> Row:
    if isinstance(config, SFTConfig):
        return Row(1, max_row_tokens(config) - 1)
    return Row(config.data.max_prompt_length, config.data.max_response_length)


def optimizer_steps_per_step(config: PPOConfig | SFTConfig, role: ModelRole) -> int:
    if role.optim is None:
        return 0
    return updates_per_pass(config) * (config.trainer.epochs_per_batch if isinstance(config, PPOConfig) else 1)


def optimizer_steps(config: PPOConfig | SFTConfig, role: ModelRole) -> int:
    """Of the whole run: where the learning rate's decay ends. In the critic's warm-up the actor makes none."""
    steps = config.trainer.total_steps
    if isinstance(config, PPOConfig) and role.name == "actor":
        steps -= config.trainer.critic_warmup_steps
    return steps * optimizer_steps_per_step(config, role)


def micro_batches(rows: int, role: ModelRole, longest: Row, multiple_of: int, rows_of_prompt: int) -> tuple[int, int]:
    """An interleaved pipeline runs a multiple of its stages (`multiple_of`); the rest are fillers. The most: where no prompt is shared."""
    room, size = micro_batch_room(role.micro_batch, role.parallel), role.parallel.context_parallel_size
    if room is None:
        assert role.micro_batch.sequences is not None
        least = most = -(-rows // role.micro_batch.sequences)
    else:
        # A row has a response token at least, and a prompt one token.
        fewest = rows * padded_length(2, size)
        if rows_of_prompt > 1:
            fewest = (rows + -(-rows // rows_of_prompt)) * padded_length(1, size)
        of_row = _room_of_row(longest, rows_of_prompt > 1, size)
        least, most = -(-fewest // room), -(-rows // (room // of_row))
    return -(-least // multiple_of) * multiple_of, -(-most // multiple_of) * multiple_of
