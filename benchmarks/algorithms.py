"""Compare the speed of the advantage estimators with a straightforward loop and with the speed of memory.

    python -m benchmarks.algorithms [--quick]

The batch is that of a step: 8192 samples (1024 prompts x 8) with 2048 response positions each in float32,
with log-normal lengths. `gae, tool output` has a hole of 64 positions in each row that is long enough. The
benchmark measures the processor seconds of one thread: the minimum of several repeats that alternate between
the contestants, so that other load on the machine slows all of them.

ours   the estimator as training calls it, including the check that rewards are finite.
loop   the implementation that one would write first: a loop over the tokens of a row for sums along it (all rows at once), and a loop
       over prompts for comparisons between samples. Its result must equal ours.
limit  a bound for every implementation: each (B, R) input is read once, at the speed of summing a float32 tensor, and each (B, R)
       output is allocated and filled once. `of reading` leaves the outputs out and so shows what they cost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.history.rows import at_most, record
from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, Advantages
from megarl.config.schema import AdvantageConfig, AdvantageEstimator

SAMPLES_PER_PROMPT = 8
TARGET = 5.0  # times the limit
CONFIG = AdvantageConfig(gamma=0.99, lam=0.95)

Batch = dict[str, Tensor | np.ndarray]
Loop = Callable[[dict[str, Tensor], list[list[int]]], Advantages]


def make_batch(num_samples: int, num_tokens: int) -> dict[str, Tensor]:
    """Make the (B, R) and (B, ...) tensors that estimators read, under the names of AdvantageInputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = (normal(num_samples).mul(0.6).exp() * num_tokens / 3).long().clamp(1, num_tokens)
    mask = torch.arange(num_tokens)[None, :] < lengths[:, None]
    rewards = (0.001 * normal(num_samples, num_tokens)).scatter_(
        1, lengths[:, None] - 1, normal(num_samples, 1)
    )
    parts = torch.randint(0, 3, (num_samples, 2), generator=generator).float()

    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": 0.1 * normal(num_samples, num_tokens),
        "baseline_scores": normal(num_samples),
        "score_parts": parts,
        "old_log_probs": -normal(num_samples, num_tokens).abs(),
        "sum_pi_squared": torch.rand(num_samples, num_tokens, generator=generator),
    }


def with_holes(batch: dict[str, Tensor], first: int = 128, size: int = 64) -> dict[str, Tensor]:
    mask = batch["response_mask"].clone()
    mask[:, first : first + size] = False
    return batch | {"response_mask": mask}


# Straightforward implementations; `groups` has the rows of each prompt.


def loop_suffix_sums(x: Tensor, mask: Tensor, discount: float) -> Tensor:
    sums = torch.zeros_like(x)
    following = torch.zeros(x.shape[0])
    for t in reversed(range(x.shape[1])):
        following = torch.where(mask[:, t], x[:, t] + discount * following, following)
        sums[:, t] = following
    return sums * mask


def loop_whiten(x: Tensor, mask: Tensor) -> Tensor:
    valid = x[mask]
    return (x - valid.mean()) * torch.rsqrt(valid.var() + 1e-8) * mask


def loop_gae(batch: dict[str, Tensor], groups: list[list[int]]) -> Advantages:
    rewards = batch["token_level_rewards"]
    values = batch["values"]
    mask = batch["response_mask"]
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros(len(rewards))
    next_advantage = torch.zeros(len(rewards))

    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + CONFIG.gamma * next_value - values[:, t]
        next_advantage = torch.where(
            mask[:, t], delta + CONFIG.gamma * CONFIG.lam * next_advantage, next_advantage
        )
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage

    return Advantages(loop_whiten(advantages, mask), (advantages + values) * mask)


def loop_over_prompts(of_prompt: Callable[[Tensor, Tensor], Tensor]) -> Loop:
    """Compute the advantages prompt by prompt.

    Args:
        of_prompt: Function from the scores (n,) and lengths (n,) of a prompt's samples to advantages (n,).
    """

    def run(batch: dict[str, Tensor], groups: list[list[int]]) -> Advantages:
        mask = batch["response_mask"]
        scores = (batch["token_level_rewards"] * mask).sum(1)
        lengths = mask.sum(1).float()
        per_row = torch.empty_like(scores)
        for rows in groups:
            per_row[rows] = of_prompt(scores[rows], lengths[rows])
        advantages = per_row[:, None] * mask

        return Advantages(advantages, advantages)

    return run


def best_over_second(scores: Tensor, lengths: Tensor) -> Tensor:
    first, second = scores.topk(2).values
    gain = torch.zeros_like(scores)
    gain[scores.argmax()] = first - second
    return gain / (scores.std() + 1e-6)


def loop_gdpo(batch: dict[str, Tensor], groups: list[list[int]]) -> Advantages:
    parts = batch["score_parts"]
    mask = batch["response_mask"]
    totals = torch.zeros(len(parts))

    for rows in groups:
        for k in range(parts.shape[1]):
            scores = parts[rows, k]
            totals[rows] += (scores - scores.mean()) / (scores.std() + 1e-6)

    advantages = ((totals - totals.mean()) / (totals.std() + 1e-6))[:, None] * mask
    return Advantages(advantages, advantages)


def loop_reinforce_plus_plus(batch: dict[str, Tensor], groups: list[list[int]]) -> Advantages:
    returns = loop_suffix_sums(batch["token_level_rewards"], batch["response_mask"], CONFIG.gamma)
    return Advantages(loop_whiten(returns, batch["response_mask"]), returns)


def loop_reinforce_plus_plus_baseline(batch: dict[str, Tensor], groups: list[list[int]]) -> Advantages:
    centered, _ = loop_over_prompts(lambda scores, _: scores - scores.mean())(batch, groups)
    assert isinstance(centered, Tensor)
    advantages = loop_whiten(centered, batch["response_mask"])
    return Advantages(advantages, advantages)


def loop_remax(batch: dict[str, Tensor], groups: list[list[int]]) -> Advantages:
    returns = loop_suffix_sums(batch["token_level_rewards"], batch["response_mask"], 1.0)
    return Advantages((returns - batch["baseline_scores"][:, None]) * batch["response_mask"], returns)


def loop_optimal_token_baseline(batch: dict[str, Tensor], groups: list[list[int]]) -> Advantages:
    mask = batch["response_mask"]
    returns = loop_suffix_sums(batch["token_level_rewards"], mask, 1.0)
    energy = ((1 - 2 * batch["old_log_probs"].exp() + batch["sum_pi_squared"]) * mask).clamp(min=0).cumsum(
        1
    ) * mask
    advantages = torch.zeros_like(returns)

    for rows in groups:
        weight = energy[rows].sum(0)
        baseline = (returns[rows] * energy[rows]).sum(0) / weight.clamp(min=1e-30)
        compared = (mask[rows].sum(0) > 1) & (weight > 0)
        advantages[rows] = torch.where(compared & mask[rows], returns[rows] - baseline, 0.0)

    return Advantages(advantages, returns)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """An estimator and its straightforward loop.

    Attributes:
        reads: The (B, R) inputs that must be read.
        makes: The (B, R) outputs.
    """

    kind: AdvantageEstimator
    loop: Loop
    reads: tuple[str, ...] = ("token_level_rewards", "response_mask")
    makes: int = 1
    holes: bool = False
    has_target: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind.value}, tool output" if self.holes else self.kind.value


_VALUES = ("token_level_rewards", "values", "response_mask")
_ENERGY = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")
CONTESTS = (
    Contest(kind=AdvantageEstimator.gae, loop=loop_gae, reads=_VALUES, makes=2, has_target=True),
    Contest(kind=AdvantageEstimator.gae, loop=loop_gae, reads=_VALUES, makes=2, holes=True),
    Contest(
        kind=AdvantageEstimator.grpo,
        loop=loop_over_prompts(lambda s, _: (s - s.mean()) / (s.std() + 1e-6)),
        has_target=True,
    ),
    Contest(kind=AdvantageEstimator.grpo_pass_k, loop=loop_over_prompts(best_over_second)),
    Contest(
        kind=AdvantageEstimator.rloo, loop=loop_over_prompts(lambda s, _: s - (s.sum() - s) / (len(s) - 1))
    ),
    Contest(kind=AdvantageEstimator.opo, loop=loop_over_prompts(lambda s, n: s - (s * n).sum() / n.sum())),
    # no group without signal: alpha is 1
    Contest(kind=AdvantageEstimator.gpg, loop=loop_over_prompts(lambda s, _: s - s.mean())),
    Contest(kind=AdvantageEstimator.reinforce_plus_plus, loop=loop_reinforce_plus_plus, makes=2),
    Contest(kind=AdvantageEstimator.reinforce_plus_plus_baseline, loop=loop_reinforce_plus_plus_baseline),
    Contest(kind=AdvantageEstimator.remax, loop=loop_remax, makes=2),
    Contest(kind=AdvantageEstimator.gdpo, loop=loop_gdpo),
    Contest(
        kind=AdvantageEstimator.optimal_token_baseline,
        loop=loop_optimal_token_baseline,
        reads=_ENERGY,
        makes=2,
    ),
)


def seconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the minimum seconds of each run, over repeats that alternate between the runs."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - start)

    return least


def check_same(ours: Advantages, loop: Advantages, name: str) -> None:
    for field in Advantages._fields:
        ours_values = getattr(ours, field)
        loop_values = getattr(loop, field)
        difference = (ours_values - loop_values).norm() / loop_values.norm()
        if not difference < 1e-4:
            raise RuntimeError(
                f"{name}: {field} of the loop are others, by {float(difference):.1e} of their norm"
            )


def run_contest(
    contest: Contest, batch: dict[str, Tensor], repeats: int
) -> tuple[float, float, float, float]:
    """Return the seconds of ours, of the loop, of reading, and of reading and making outputs."""
    batch = with_holes(batch) if contest.holes else batch
    num_samples = len(batch["response_mask"])
    prompts = np.random.default_rng(0).permutation(num_samples) // SAMPLES_PER_PROMPT
    uid = np.array([f"prompt-{prompt}" for prompt in prompts], dtype=object)
    order = np.argsort(prompts, kind="stable")
    groups = order.reshape(-1, SAMPLES_PER_PROMPT).tolist()
    like = batch["token_level_rewards"]

    def ours() -> Advantages:
        return ADVANTAGE_ESTIMATORS[contest.kind](AdvantageInputs(uid=uid, **batch), CONFIG)

    def loop() -> Advantages:
        return contest.loop(batch, groups)

    check_same(ours(), loop(), contest.name)
    runs: dict[str, Callable[[], object]] = {
        "ours": ours,
        "read": like.sum,
        "make": lambda: torch.empty_like(like).fill_(1.0),
    }
    measured = seconds(runs, repeats)
    loop_seconds = seconds({"loop": loop}, max(1, repeats // 4))["loop"]
    bytes_read = sum(batch[key].element_size() * batch[key].numel() for key in contest.reads)
    reading = measured["read"] * bytes_read / (like.element_size() * like.numel())

    return measured["ours"], loop_seconds, reading, reading + contest.makes * measured["make"]


def main() -> int:
    """Run the contests and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1024 samples of 512 tokens, three repeats")
    arguments = parser.parse_args()
    num_samples, num_tokens, repeats = (1024, 512, 3) if arguments.quick else (8192, 2048, 8)
    torch.set_num_threads(1)
    print(
        f"B = {num_samples}, R = {num_tokens}; torch {torch.__version__}, one thread, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'estimator':<30} {'ours, ms':>9} {'loop, ms':>9} {'faster':>7} {'limit, ms':>10} {'of limit':>9} "
        f"{'of reading':>11}"
    )
    batch = make_batch(num_samples, num_tokens)
    missed = []
    judged = {}

    for contest in CONTESTS:
        ours, loop, reading, limit = run_contest(contest, batch, repeats)
        target = f"  (target {TARGET:g})" if contest.has_target else ""
        print(
            f"{contest.name:<30} {ours * 1e3:9.1f} {loop * 1e3:9.1f} {loop / ours:6.1f}x "
            f"{limit * 1e3:10.1f} {ours / limit:8.1f}x "
            f"{ours / reading:10.1f}x{target}",
            flush=True,
        )
        if contest.has_target:
            judged[f"{contest.name} of limit"] = at_most(ours / limit, TARGET)
        if contest.has_target and ours / limit > TARGET:
            missed.append(contest.name)

    record("benchmarks.algorithms", ratios=judged)
    print(f"targets missed: {', '.join(missed)}" if missed else "every target is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
