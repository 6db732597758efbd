"""The micro-batches of a pass: how many packing yields, and the tokens of one rank in the typical one. Pure.

The tokens are laid out as the engine lays them out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil, lcm
from typing import NamedTuple

from megarl.config.batch_arithmetic import (
    Row,
    chunks_of_rank,
    micro_batch_room,
    padded_length,
    rows_of_prompt,
    rows_of_replica,
)
from megarl.config.megatron_options import token_multiple
from megarl.config.roles import ModelRole
from megarl.config.schema import DType, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import replaces_core
from megarl.plan.placement.layer_sizes import always_gathers, layer_kind
from megarl.plan.step_time.lengths import Lengths

# Rows that are packed one by one; a replica with more of them is scaled up.
_MOST_PACKED = 512
# Rows that represent the lengths of a pass.
_SAMPLED = 16


class Rectangle(NamedTuple):
    """Queries that attend to keys in one attention call.

    Attributes:
        keys: The number of keys. The last query sees the last key.
        is_causal: Whether a query sees no key after its own; otherwise every query sees every key.
    """

    queries: int
    keys: int
    is_causal: bool = True

    def pairs(self, window: int = 0) -> int:
        """Return the pairs of a query and a key that the mask leaves. `window` 0 means full attention."""
        if not self.is_causal:
            return self.queries * self.keys
        before = self.keys - self.queries  # keys that every query sees
        growing = min(self.queries, max(0, window - before)) if window else self.queries
        return growing * before + growing * (growing + 1) // 2 + (self.queries - growing) * window


class PackedBatch(NamedTuple):
    """The first tensor- and context-parallel rank's part of a micro-batch.

    Attributes:
        tokens: Tokens with padding, of all tensor-parallel ranks together.
        kept: The tokens that a last dense layer keeps after its attention, of all these ranks.
        scored: The response tokens whose logits this context-parallel rank computes.
        responses: The response tokens of all context-parallel ranks.
        tokens_with_prompts: The tokens of all context-parallel ranks, with the prompt before each response
            that shares one.
        prompts: The tokens of each distinct prompt.
        attention: The attention calls of a layer.
        passes_keys_on: Whether each context-parallel rank passes keys and values on to the next one, as
            Transformer Engine does without shared prompts. Otherwise, all ranks gather all of them.
        share: The share of `prompts` and of `attention` that the micro-batch has; below 1 for the mean of
            several micro-batches.
    """

    tokens: int
    kept: int
    scored: int
    responses: int
    tokens_with_prompts: int
    prompts: tuple[int, ...]
    attention: tuple[Rectangle, ...]
    passes_keys_on: bool
    share: float = 1.0

    def scaled(self, share: float, multiple: int) -> PackedBatch:
        """Return the mean micro-batch of those among which this one's rows are distributed.

        Args:
            share: The share of the rows that a micro-batch has on average. Above 1 if it has more.
            multiple: The tokens of a rank are padded to a multiple of this.
        """
        tokens = _padded(self.tokens * share, multiple)
        return self._replace(
            tokens=tokens,
            kept=min(tokens, _padded(self.kept * share, multiple)),
            scored=round(self.scored * share),
            responses=round(self.responses * share),
            tokens_with_prompts=round(self.tokens_with_prompts * share),
            share=share,
        )


class _Sequence(NamedTuple):
    """A packed sequence.

    Attributes:
        length: The number of tokens with padding.
        prompt: The number of the sequence that it continues, None if it continues none.
        predictors: The range of its tokens that predict a response token.
        uses: How many response tokens each of them predicts.
    """

    length: int
    prompt: int | None = None
    predictors: range = range(0)
    uses: int = 1


def pack(config: RunConfig, role: ModelRole, architecture: Architecture, rows: Sequence[Row]) -> PackedBatch:
    """Lay out the rows of a micro-batch on the first rank of a stage."""
    size = role.parallel.context_parallel_size
    parts = _num_parts(role)
    multiple = rank_multiple(role)
    responses = sum(row.response for row in rows)

    # Without packing, every row is padded to the longest one, and no token is dropped.
    if not config.engine.packing:
        length = _padded(max(row.tokens for row in rows), multiple)
        tokens = len(rows) * length
        return PackedBatch(
            tokens=tokens,
            kept=tokens,
            scored=responses,
            responses=responses,
            tokens_with_prompts=tokens,
            prompts=tuple(row.prompt for row in rows),
            attention=(Rectangle(length, length),) * len(rows),
            passes_keys_on=False,
        )

    sequences = list(_sequences(rows, rows_of_prompt(config, role) > 1, size))
    num_tokens = sum(sequence.length for sequence in sequences)
    padding = -num_tokens % (size * multiple)
    sequences += [_Sequence(padding)] if padding else []
    tokens = (num_tokens + padding) // size
    chosen, scored = _predictors(sequences, size)
    prompts = [_prompt_length(sequence, sequences) for sequence in sequences]
    gathers = any(prompts) or always_gathers(config, architecture, layer_kind(config))
    # Attention in float32, or with sinks or windows, takes the keys of each response with its prompt's.
    in_pieces = size > 1 or replaces_core(architecture) or config.model.dtype is DType.float32

    return PackedBatch(
        tokens=tokens,
        kept=parts * _kept(chosen, tokens // parts, parts, token_multiple(role.megatron)),
        scored=scored,
        responses=responses,
        tokens_with_prompts=num_tokens + padding + sum(prompts),
        prompts=tuple({row.prompt_number: row.prompt for row in rows}.values()),
        attention=tuple(
            _ring_rectangles(sequences, size)
            if size > 1 and not gathers
            else (_pieces(sequences, size) if in_pieces else _two_calls(sequences))
        ),
        passes_keys_on=not gathers,
    )


def rank_multiple(role: ModelRole) -> int:
    """Return the number to a multiple of which the tokens of a context-parallel rank are padded."""
    unit = _num_parts(role) * token_multiple(role.megatron)
    return unit if role.parallel.context_parallel_size == 1 else lcm(2, unit)


def _num_parts(role: ModelRole) -> int:
    return role.parallel.tensor_parallel_size if role.parallel.sequence_parallel else 1


def _padded(tokens: float, multiple: int) -> int:
    return ceil(tokens / multiple) * multiple


def _prompt_length(sequence: _Sequence, sequences: Sequence[_Sequence]) -> int:
    return 0 if sequence.prompt is None else sequences[sequence.prompt].length


def _sequences(rows: Sequence[Row], shares_prompts: bool, size: int) -> Iterator[_Sequence]:
    """Yield the sequences. A shared prompt is one, followed by the responses of its rows."""
    groups: dict[int, list[Row]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.prompt_number if shares_prompts else number, []).append(row)
    number = 0

    for group in groups.values():
        prompt = group[0].prompt
        # A prompt with a single response is not shared, so both stay in one sequence.
        if len(group) == 1:
            (row,) = group
            predictors = range(prompt - 1, prompt - 1 + row.response)
            yield _Sequence(padded_length(row.tokens, size), None, predictors)
            number += 1
            continue

        answered = [row for row in group if row.response]
        # The end of the prompt predicts the first token of every response.
        yield _Sequence(padded_length(prompt, size), None, range(prompt - 1, prompt), len(answered))
        for row in answered:
            yield _Sequence(padded_length(row.response, size), number, range(row.response - 1))
        number += 1 + len(answered)


def _predictors(sequences: Sequence[_Sequence], size: int) -> tuple[list[range], int]:
    """Return where the rank's predictors are among its tokens, and how many response tokens they predict."""
    found = []
    scored = 0
    start = 0

    for sequence in sequences:
        for chunk in chunks_of_rank(sequence.length, size, 0):
            first = max(chunk.start, sequence.predictors.start)
            stop = min(chunk.stop, sequence.predictors.stop)
            if stop > first:
                found.append(range(start + first - chunk.start, start + stop - chunk.start))
                scored += (stop - first) * sequence.uses
            start += len(chunk)

    return found, scored


def _kept(chosen: Sequence[range], part: int, parts: int, multiple: int) -> int:
    """Return how many tokens each part keeps: as many as the part with most predictors has, at least one."""
    most = 1
    for start in range(0, part * parts, part):
        held = sum(max(0, min(each.stop, start + part) - max(each.start, start)) for each in chosen)
        most = max(most, held)
    return _padded(most, multiple)


def _two_calls(sequences: Sequence[_Sequence]) -> Iterator[Rectangle]:
    """Yield the calls without context parallelism.

    Every sequence attends to itself, and all responses to a prompt attend to it without a mask.
    """
    followers: dict[int, int] = {}
    for sequence in sequences:
        yield Rectangle(sequence.length, sequence.length)
        if sequence.prompt is not None:
            followers[sequence.prompt] = followers.get(sequence.prompt, 0) + sequence.length
    for prompt, queries in followers.items():
        yield Rectangle(queries, sequences[prompt].length, is_causal=False)


def _pieces(sequences: Sequence[_Sequence], size: int) -> Iterator[Rectangle]:
    """Yield the calls of chunks. Keys are those of the prompt, and of the sequence up to the chunk's end."""
    for sequence in sequences:
        before = _prompt_length(sequence, sequences)
        for chunk in chunks_of_rank(sequence.length, size, 0):
            yield Rectangle(len(chunk), before + chunk.stop)


def _ring_rectangles(sequences: Sequence[_Sequence], size: int) -> Iterator[Rectangle]:
    """Yield the calls of the first rank in a ring.

    Both of its chunks attend to themselves. Of the chunks of a later rank, its second one sees both.
    """
    for sequence in sequences:
        chunk = sequence.length // (2 * size)
        yield Rectangle(2 * chunk, 2 * chunk)
        for _ in range(size - 1):
            yield Rectangle(chunk, 2 * chunk, is_causal=False)


def micro_batches_of(
    config: RunConfig, role: ModelRole, architecture: Architecture, lengths: Lengths, *, trains: bool
) -> tuple[int, PackedBatch]:
    """Return how many micro-batches a replica has in a pass, and the mean one.

    A pass has a mini-batch if the role trains, otherwise a whole step.

    The time of a pass is linear in the tokens of its micro-batches and in their pairs of a query and a key,
    so the mean micro-batch gives the time of all of them.
    """
    num_rows = rows_of_replica(config, role, trains=trains)
    together = min(rows_of_prompt(config, role), num_rows)

    # Interleaved pipelines run whole rounds of micro-batches. Each one has a row, if need be a repeated one.
    multiple = role.parallel.micro_batch_multiple
    count = ceil(_num_filled(role, lengths, num_rows, together) / multiple) * multiple
    rows_of_each = max(1.0, num_rows / count)

    # Without packing, rows are padded to the longest one, so the number of sampled rows is a micro-batch's.
    if config.engine.packing:
        rows = sampled_rows(lengths, rows_of_each, together)
    else:
        rows = sampled_rows(lengths, 1.0, 1, round(rows_of_each))
    return count, pack(config, role, architecture, rows).scaled(rows_of_each / len(rows), rank_multiple(role))


def _num_filled(role: ModelRole, lengths: Lengths, num_rows: int, together: int) -> int:
    """Return the number of micro-batches that rows fill, `together` of which share a prompt."""
    room = micro_batch_room(role.micro_batch, role.parallel)
    if room is None:
        assert role.micro_batch.sequences is not None
        return ceil(num_rows / role.micro_batch.sequences)

    size = role.parallel.context_parallel_size
    prompt = padded_length(lengths.prompt, size)
    packed = min(num_rows, _MOST_PACKED)
    responses = [padded_length(response, size) for response in lengths.spread(packed)]

    # Rows of one prompt are next to each other and share its tokens.
    count = num_bins(tuple(round(response + prompt / together) for response in responses), room)
    # Micro-batches with fewer rows than a prompt has need its tokens each.
    if packed < count * together:
        count = num_bins(tuple(responses), room - prompt)
    return max(1, round(count * num_rows / packed))


def sampled_rows(
    lengths: Lengths, rows_of_each: float, together: int, least: int = _SAMPLED
) -> tuple[Row, ...]:
    """Return rows with the mean and the mean square of all responses, and with as many prompts per row.

    Args:
        rows_of_each: The mean number of rows of a micro-batch.
        together: The number of rows that share a prompt if they are in one micro-batch.
        least: The least number of rows.
    """
    # A micro-batch with fewer rows than a prompt has contains a single prompt.
    of_prompt = min(rows_of_each, together)
    fewest = ceil(least / of_prompt)
    num_prompts = min(
        range(fewest, 2 * fewest + 1),
        key=lambda count: abs(round(count * of_prompt) / (count * of_prompt) - 1),
    )
    num_rows = round(num_prompts * of_prompt)
    return tuple(
        Row(lengths.prompt, response, index * num_prompts // num_rows)
        for index, response in enumerate(lengths.sample(num_rows))
    )


@lru_cache(maxsize=1024)
def num_bins(sizes: tuple[int, ...], room: int) -> int:
    """Return the number of bins that best-fit decreasing packing fills. A larger item has its own bin."""
    left: list[int] = []  # room of open bins, ascending
    count = 0
    for size in sorted(sizes, reverse=True):
        place = bisect_left(left, size)
        if place < len(left):
            insort(left, left.pop(place) - size)
        else:
            count += 1
            if size < room:
                insort(left, room - size)
    return count
