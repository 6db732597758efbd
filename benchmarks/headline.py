"""Measure what each feature gains on a GRPO step, alone and together, compared with a naive step in the same run.

    python -m benchmarks.headline [--quick] [--cpu-time]

The work is the actor's part of a step on 32 rows (16 with the larger model), 8 samples of each prompt: the
samples' old log-probs, those of a reference, and one update's forward + backward (no optimizer step), in
float32. Responses have log-normal lengths, on average a third of the longest (192 tokens), and prompts a
quarter of that average. The models and the rules are those of engine.py: contestants alternate, and their
losses must agree. A speed is real tokens per second, counting the whole prompt of each sample.

naive           every pass, rows padded to the longest of their micro-batch, 8 rows in each: as many as are safe if memory fits 8
                rows of the longest length. The reference's pass is that of an engine of the same size.
packing         the naive step with packed rows
token_budget    packed rows in micro-batches of at most N tokens, over packed rows in a fixed number of N // longest. The target applies to N
                of one longest row; larger ones are shown
shared_prompts  the step with packed rows in which each prompt is once in a micro-batch, over packed rows; also with prompts as long as the
                mean response, which leave 9 of 16 tokens
one_pass        the naive step, whose update scores the samples in its own pass
all             packing, shared prompts, a budget of the naive step's memory, and one pass, over naive
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping

import torch

from benchmarks.engine import (
    MODELS,
    SAMPLES,
    Contest,
    MicroBatches,
    Result,
    RowLayout,
    Step,
    Timing,
    compare,
    log_normal_lengths,
    make_samples,
    race,
)
from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    KLConfig,
    KLEstimator,
    KLWhere,
)
from megarl.data.packing import plan_micro_batches
from megarl.engine.vocab_parallel import Extra

# tokens
LONGEST_RESPONSE = 192
MEAN_RESPONSE = 64
SAFE_ROWS = 8  # of the longest length, that fit into the memory of the naive step
BUDGETS = (1, 2, 4)  # in rows of the longest length
TARGETS = {"packing": 1.3, "all": 1.8}
SHARED_TARGETS = {MEAN_RESPONSE // 4: 1.1, MEAN_RESPONSE: 1.5}  # by tokens of a prompt
ALGORITHM = AlgorithmConfig(
    advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo),
    kl=KLConfig(where=KLWhere.loss, estimator=KLEstimator.k3, coefficient=0.001),
)


class Work:
    """The rows of a step, and the steps that process them."""

    def __init__(self, contest: Contest, prompt_tokens: int) -> None:
        self._contest = contest
        responses = log_normal_lengths(contest.shape.log_normal_rows, LONGEST_RESPONSE)
        batch = make_samples(prompt_tokens, responses, contest.shape.vocab_size)
        self.lengths = [prompt_tokens + response for response in responses]
        self.longest = prompt_tokens + LONGEST_RESPONSE
        self._prompts = [(row // SAMPLES, prompt_tokens) for row in range(len(responses))]
        mask = batch["response_mask"]
        per_row = torch.randn(len(mask), 1, generator=torch.Generator().manual_seed(2))
        self._columns = DataProto.from_dict({**batch, "advantages": per_row.expand(mask.shape)}).ragged
        self._loss = ActorLoss(algorithm=ALGORITHM, counts=MiniBatchCounts.of(mask), with_entropy=True)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def micro_batches(
        self, layout: RowLayout, *, rows: int | None = None, budget: int | None = None
    ) -> MicroBatches:
        """Split the rows into micro-batches of a number of rows, or of a budget of tokens.

        The budget is as many tokens as that number of rows of the longest length.
        """
        plan = plan_micro_batches(
            self.lengths,
            1,
            sequences=rows,
            max_tokens=None if budget is None else budget * self.longest,
            prompts=self._prompts if layout == "shared" else None,
        )
        return list(plan.ranks[0].micro_batches)

    def step(
        self, layout: RowLayout, *, rows: int | None = None, budget: int | None = None, one_pass: bool = True
    ) -> Step:
        micro_batches = self.micro_batches(layout, rows=rows, budget=budget)

        def step() -> float:
            engine = self._contest.engine(layout)

            def scores() -> RaggedTensor:
                extras: tuple[Extra, ...] = () if one_pass else ("entropy",)
                result = engine.forward(self._columns, micro_batches, extras)
                assert result is not None
                return result["log_probs"]

            rows = {**self._columns, "ref_log_prob": scores()}
            if not one_pass:
                rows["old_log_probs"] = scores()
            metrics = engine.forward_backward(
                rows, micro_batches, self._loss, self._loss.extras if one_pass else ()
            )

            return float(metrics["actor/pg_loss"].value)

        return step


def contests(contest: Contest, features: bool, timing: Timing) -> Iterator[Result]:
    """Run the contests. `features` lists those that also run alone."""
    work = Work(contest, MEAN_RESPONSE // 4)
    naive = work.step("padded", rows=SAFE_ROWS, one_pass=False)
    packed = work.step("packed", rows=SAFE_ROWS, one_pass=False)

    def compared(name: str, target: float | None, contestants: Mapping[str, Step], on: Work = work) -> Result:
        return compare(f"{name}, {contest.size}", contestants, on.num_tokens, timing, target)

    if features:
        yield compared("packing", TARGETS["packing"], {"packed": packed, "naive": naive})
        for rows in BUDGETS:
            contestants = {
                f"budget ({len(work.micro_batches('packed', budget=rows))} micro-batches)": work.step(
                    "packed", budget=rows
                ),
                f"fixed ({len(work.micro_batches('packed', rows=rows))})": work.step("packed", rows=rows),
            }
            yield compared(f"token_budget {rows * work.longest}", 1.2 if rows == 1 else None, contestants)
        yield compared("one_pass", None, {"one pass": work.step("padded", rows=SAFE_ROWS), "naive": naive})

    for prompt_tokens, target in SHARED_TARGETS.items():
        on = Work(contest, prompt_tokens)
        contestants = {
            layout: on.step(layout, rows=SAFE_ROWS, one_pass=False) for layout in ("shared", "packed")
        }
        yield compared(f"shared_prompts of {prompt_tokens}", target, contestants, on)

    yield compared("all", TARGETS["all"], {"all": work.step("shared", budget=SAFE_ROWS), "naive": naive})


def main() -> int:
    """Run the contests and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the 10M model only")
    parser.add_argument("--cpu-time", action="store_true", help="one thread and its processor seconds")
    arguments = parser.parse_args()

    def results(timing: Timing) -> Iterator[Result]:
        for size in ["10M"] if arguments.quick else MODELS:
            yield from contests(Contest(size), size == "10M", timing)

    return race("benchmarks.headline", results, "feature", 3, arguments.cpu_time)


if __name__ == "__main__":
    sys.exit(main())
