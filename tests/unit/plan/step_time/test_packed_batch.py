"""The typical micro-batch, times the number of micro-batches, is what a pass has: tokens and attention."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.tuning.shipped import read_run, shipped_runs
from megarl.config.batch_arithmetic import rows_of_prompt, rows_of_replica
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR, with_published_models
from megarl.config.validate import read_architectures
from megarl.plan.step_time.lengths import Lengths, expected_lengths, measured_lengths
from megarl.plan.step_time.packed_batch import PackedBatch, micro_batches_of, num_bins, sampled_rows

# 64 samples on 8 replicas. The longest row has 256 tokens.
BY_HAND = (
    "data.max_prompt_length=64",
    "data.max_response_length=192",
    "trainer.prompts_per_step=16",
    "trainer.updates_per_step=1",
    "rollout.n=4",
    "actor.parallel.tensor_parallel_size=1",
    "actor.parallel.sequence_parallel=false",
    "actor.parallel.data_parallel_size=8",
)


def actors(lengths: Lengths, *overrides: str) -> tuple[int, PackedBatch]:
    """Return the micro-batches in which each of 8 replicas trains its 8 rows of 2 prompts."""
    path = CONFIGS_DIR / "qwen2.5_7b_grpo.yaml"
    config = with_published_models(load_config(PPOConfig, path, (*BY_HAND, *overrides)), str(path))[0]
    architectures, _ = read_architectures(config)
    (role,) = (each for each in model_roles(config) if each.name == "actor")
    return micro_batches_of(config, role, architectures["actor"], lengths, trains=True)


def pairs(count: int, typical: PackedBatch) -> float:
    """Return the pairs of a query and a key of all micro-batches."""
    return count * typical.share * sum(each.pairs() for each in typical.attention)


@pytest.mark.parametrize("name", shipped_runs())
def test_tokens_and_attention_of_every_shipped_run_are_conserved(name: str) -> None:
    config = read_run(name)
    architectures, _ = read_architectures(config)
    lengths = expected_lengths(config)
    prompt = lengths.prompt
    response = fmean(lengths.responses)
    square = fmean(each**2 for each in lengths.responses)

    for role in model_roles(config):
        for phase in role.phases:
            count, typical = micro_batches_of(
                config, role, architectures[role.name], lengths, trains=phase.trains
            )
            num_rows = rows_of_replica(config, role, trains=phase.trains)
            # Every micro-batch has a prompt, and every prompt is in one.
            prompts = max(count, num_rows / rows_of_prompt(config, role))
            num_ranks = role.parallel.context_parallel_size

            assert count * typical.responses == pytest.approx(num_rows * response, rel=3e-4)
            expected = num_rows * response + prompts * prompt
            assert count * typical.tokens * num_ranks == pytest.approx(expected, rel=2e-3)
            # Of each sequence the causal mask leaves half of the pairs; all responses see their prompt.
            expected = prompts * prompt**2 / 2 + num_rows * (square / 2 + response * prompt)
            assert num_ranks * pairs(count, typical) == pytest.approx(expected, rel=3e-3)


def test_one_row_in_each_micro_batch_has_the_mean_length_and_the_mean_square() -> None:
    # Three of four responses have 32 tokens, and one has 160: the median is 32, and the mean is 64.
    lengths = measured_lengths(16, [32, 32, 32, 160])
    count, typical = actors(lengths, "actor.micro_batch.max_tokens=256", "engine.share_prompts=false")
    # Two of the 8 rows are alone with 176 tokens, and 80 tokens are left for a row of 48; four rows have 192.
    assert count == 3
    assert count * typical.responses == pytest.approx(8 * 64, abs=1)
    assert count * typical.tokens == pytest.approx(8 * (16 + 64), abs=3)
    by_hand = 6 * 48 * 49 / 2 + 2 * 176 * 177 / 2
    assert pairs(count, typical) == pytest.approx(by_hand, rel=0.01)


def test_prompts_that_micro_batches_share_count_once_in_each() -> None:
    lengths = measured_lengths(16, [64])
    # Both prompts, each with four responses: 2 x (16 + 4 x 64) = 544 tokens.
    count, typical = actors(lengths, "actor.micro_batch.max_tokens=544")
    assert (count, typical.tokens, typical.responses) == (1, 544, 512)
    # Two responses and their prompt: 144 tokens, of which the prompt is computed four times.
    count, typical = actors(lengths, "actor.micro_batch.max_tokens=150")
    assert (count, typical.tokens, typical.responses) == (4, 144, 128)
    assert pairs(count, typical) == 4 * (16 * 17 / 2 + 2 * (64 * 65 / 2 + 64 * 16))


def test_interleaved_pipelines_have_more_and_smaller_micro_batches() -> None:
    lengths = measured_lengths(16, [64])
    layout = (
        "actor.parallel.data_parallel_size=2",
        "actor.parallel.pipeline_parallel_size=4",
        "actor.parallel.virtual_pipeline_parallel_size=7",
        "actor.micro_batch.max_tokens=480",
        "engine.share_prompts=false",
    )
    # 32 rows of 80 tokens, six in a micro-batch: 6 micro-batches, and 8 with whole rounds of 4 stages.
    count, typical = actors(lengths, *layout)
    assert (count, typical.tokens, typical.responses) == (8, 4 * 80, 4 * 64)


def test_each_micro_batch_has_a_row_even_if_it_repeats_one() -> None:
    lengths = measured_lengths(16, [64])
    layout = (
        "trainer.prompts_per_step=2",
        "rollout.n=1",
        "actor.parallel.data_parallel_size=2",
        "actor.parallel.pipeline_parallel_size=4",
        "actor.parallel.virtual_pipeline_parallel_size=7",
        "actor.micro_batch.max_tokens=480",
    )
    count, typical = actors(lengths, *layout)
    assert (count, typical.tokens) == (4, 80)


@pytest.mark.parametrize(
    ("rows_of_each", "together", "num_rows", "num_prompts"),
    [
        (1.0, 1, 16, 16),
        (24.0, 8, 16, 2),  # whole prompts
        (3.4, 8, 17, 5),  # micro-batches of one prompt each
        (1.5, 4, 18, 12),
    ],
)
def test_sampled_rows_have_as_many_prompts_as_a_pass(
    rows_of_each: float, together: int, num_rows: int, num_prompts: int
) -> None:
    lengths = measured_lengths(10, range(1, 401))
    rows = sampled_rows(lengths, rows_of_each, together)
    assert len(rows) == num_rows
    assert len({row.prompt_number for row in rows}) == num_prompts
    assert fmean(row.response for row in rows) == pytest.approx(200.5, abs=0.05)
    # The mean of n^2 for n up to 400 is 401 * 801 / 6.
    assert fmean(row.response**2 for row in rows) == pytest.approx(401 * 801 / 6, rel=1e-3)


def test_a_sample_of_one_length_is_the_mean() -> None:
    assert measured_lengths(10, [10, 20, 90]).sample(1) == (40,)


def test_best_fit_decreasing_packing() -> None:
    assert num_bins((6, 5, 4, 3, 2), 10) == 2  # 6 + 4 and 5 + 3 + 2
    assert num_bins((6, 6, 6), 10) == 3
    assert num_bins((12, 10, 1), 10) == 3  # the first one does not fit, and is alone
    assert num_bins((10,) * 7, 20) == 4
