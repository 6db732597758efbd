"""What each feature gains on a step of GRPO, and what they gain together, beside a naive step in the same run.

    python benchmarks/headline.py [--cpu-time]

Work: the actor's side of a step on 32 rows of log-normal length, their mean a third of the longest (256 tokens, prompt and response): the
samples' old log-probs, those of a reference, and one update's forward + backward (no optimizer step), in float32, on the 10M model of
engine.py, with its rules for a fair race: contestants alternate, and their losses must agree. A speed is real tokens per second.

naive          every pass, rows padded to the longest of their micro-batch, 8 rows in each: as many as are safe where memory holds 8 rows of
               the longest length. The reference's pass is that of an engine of the same size.
packing        the naive step with packed rows
token_budget   packed rows in micro-batches of at most N tokens, over packed rows in a fixed number of N // longest. The target is for N of
               one longest row; larger ones are shown
one_pass       the naive step, whose update scores the samples in its own pass
all            packing, a budget of the naive step's memory, and one pass, over naive
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.engine import (
    LONGEST,
    Contest,
    MicroBatches,
    Result,
    Step,
    Timing,
    compare,
    log_normal_lengths,
    make_batch,
    processor_name,
)
from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, AlgorithmConfig, KLConfig, KLEstimator, KLWhere
from megarl.data.packing import plan_micro_batches
from megarl.engine.vocab_parallel import Extra

SAFE_ROWS = 8  # of the longest length, that the memory of the naive step holds
BUDGETS = (1, 2, 4)  # in rows of the longest length
TARGETS = {"packing": 1.3, "token_budget": 1.2, "all": 1.8}
ALGORITHM = AlgorithmConfig(
    advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo),
    kl=KLConfig(where=KLWhere.loss, estimator=KLEstimator.k3, coefficient=0.001),
)


class Work:
    """The rows of a step, and steps on them."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        self.lengths = log_normal_lengths(contest.shape.log_normal_rows)
        self._batch = make_batch(self.lengths, contest.shape.vocab_size)
        mask = self._batch["response_mask"]
        per_row = torch.randn(len(mask), 1, generator=torch.Generator().manual_seed(2))
        self._advantages = per_row.expand(mask.shape).contiguous()
        self._loss = ActorLoss(algorithm=ALGORITHM, counts=MiniBatchCounts.of(mask), with_entropy=True)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def fixed(self, rows: int) -> MicroBatches:
        return [micro_batch.rows for micro_batch in plan_micro_batches(self.lengths, 1, sequences=rows).ranks[0].micro_batches]

    def budget(self, rows: int) -> MicroBatches:
        """Of tokens that are as many as so many rows of the longest length."""
        plan = plan_micro_batches(self.lengths, 1, max_tokens=rows * LONGEST)
        return [micro_batch.rows for micro_batch in plan.ranks[0].micro_batches]

    def step(self, micro_batches: MicroBatches, *, packing: bool = True, one_pass: bool = True) -> Step:
        engine = self._contest.engines[packing]

        def scores() -> Tensor:
            extras: tuple[Extra, ...] = () if one_pass else ("entropy",)
            result = engine.forward(self._batch, micro_batches, extras)
            assert result is not None
            log_probs = result["log_probs"]
            assert isinstance(log_probs, Tensor), "as the batch is"
            return log_probs

        def step() -> float:
            rows = {**self._batch, "advantages": self._advantages, "ref_log_prob": scores()}
            if not one_pass:
                rows["old_log_probs"] = scores()
            metrics = engine.forward_backward(rows, micro_batches, self._loss, self._loss.extras if one_pass else ())
            return float(metrics["actor/pg_loss"].value)

        return step


def contests(work: Work, timing: Timing) -> list[Result]:
    naive = {"packing": False, "one_pass": False}
    fixed = work.fixed(SAFE_ROWS)
    pairs = {
        "packing": {"packed": work.step(fixed, one_pass=False), "naive": work.step(fixed, **naive)},
        **{
            f"token_budget, {rows * LONGEST} tokens": {
                f"budget ({len(work.budget(rows))} micro-batches)": work.step(work.budget(rows)),
                f"fixed ({len(work.fixed(rows))})": work.step(work.fixed(rows)),
            }
            for rows in BUDGETS
        },
        "one_pass": {"one pass": work.step(fixed, packing=False), "naive": work.step(fixed, **naive)},
        "all": {"all": work.step(work.budget(SAFE_ROWS)), "naive": work.step(fixed, **naive)},
    }
    results = []
    for name, contestants in pairs.items():
        target = TARGETS.get(name, TARGETS["token_budget"] if name == f"token_budget, {LONGEST} tokens" else None)
        results.append(compare(name, contestants, work.num_tokens, timing, target))
        print(results[-1], flush=True)
    return results


def main() -> int:
    """Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and its seconds on the processor")
    arguments = parser.parse_args()
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if arguments.cpu_time else num_cores)
    disable_progress_bar()
    print(f"{processor_name()}, {num_cores} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print(f"{torch.get_num_threads()} threads, seconds {'on the processor' if arguments.cpu_time else 'on the clock'}")
    print(f"{'feature':<31} ratio   target      tokens/s")
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/rendezvous", rank=0, world_size=1)
        timing = Timing(clock=time.process_time if arguments.cpu_time else time.perf_counter, repeats=3)
        results = contests(Work(Contest("10M")), timing)
        dist.destroy_process_group()
    missed = [result.name for result in results if not result.is_met]
    print(f"targets missed: {', '.join(missed)}" if missed else "every target is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
