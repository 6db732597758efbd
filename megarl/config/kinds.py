"""The choices of the configuration whose members declare what they need of a run, once, as data that can be
read without torch.

What they do stands elsewhere: the maths of estimators and losses in `megarl/algorithms`, engines in
`megarl/workers/engines.py`, loggers in `megarl/tracking/loggers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megarl.config.versions import SGLANG


class Kind(str, Enum):
    """A member is its name and its declaration, as in `rloo = "rloo", EstimatorNeeds(compares_samples=True)`;
    one without a declaration is a TypeError at import. Files, command lines and OmegaConf see the name.

    `needs` is what rules, placement, roles and documentation ask for, so that none of them asks for a member
    by its name. What a member does (maths, an engine, a logger) is registered under it where that is written.
    """

    _value_: str
    needs: Any

    def __new__(cls, name: str, needs: object) -> Kind:
        member = str.__new__(cls, name)
        member._value_ = name
        member.needs = needs
        return member


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    """What an estimator needs beside the rewards of a batch. The names of batch keys are those of
    `AdvantageInputs`."""

    # with the others of their prompt: `rollout.n` is 2 or more, and equal scores teach nothing
    compares_samples: bool
    critic: bool = False  # `values`
    # `baseline_scores`: a greedy response to each prompt, generated and scored besides
    greedy_baseline: bool = False
    # `score_parts`: each reward function's score, in place of the rewards and of the penalties in them
    score_parts: bool = False
    # `old_log_probs`: the trainer's, of the samples, which are scored before the update for it
    old_log_probs: bool = False
    # `sum_pi_squared`: of the trainer's probabilities; they come with `old_log_probs`
    sum_pi_squared: bool = False


class AdvantageEstimator(Kind):
    needs: EstimatorNeeds

    gae = "gae", EstimatorNeeds(compares_samples=False, critic=True)  # with a critic
    grpo = "grpo", EstimatorNeeds(compares_samples=True)  # the group's mean and deviation
    # the best of the group against its second best
    grpo_pass_k = "grpo_pass_k", EstimatorNeeds(compares_samples=True)
    rloo = "rloo", EstimatorNeeds(compares_samples=True)  # the mean of the group's other samples
    # whitened over the batch, no groups
    reinforce_plus_plus = "reinforce_plus_plus", EstimatorNeeds(compares_samples=False)
    # the group's mean, whitened over the batch
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline", EstimatorNeeds(compares_samples=True)
    opo = "opo", EstimatorNeeds(compares_samples=True)  # the group's mean weighted by length
    gpg = "gpg", EstimatorNeeds(compares_samples=True)  # the group's mean, scaled for groups without signal
    # the score of a greedy response
    remax = "remax", EstimatorNeeds(compares_samples=False, greedy_baseline=True)
    # each reward function by itself, then added
    gdpo = "gdpo", EstimatorNeeds(compares_samples=True, score_parts=True)
    # a baseline for each token, by the gradient's squared norm
    optimal_token_baseline = (
        "optimal_token_baseline",
        EstimatorNeeds(compares_samples=True, old_log_probs=True, sum_pi_squared=True),
    )


class Aggregation(str, Enum):
    token_mean = "token_mean"  # every token weighs the same
    sequence_mean_token_sum = "sequence_mean_token_sum"  # the sum over a response, the mean over responses
    sequence_mean_token_mean = "sequence_mean_token_mean"  # the mean over a response, the mean over responses
    # the sum over a response by `norm_tokens`, the mean over responses
    sequence_mean_token_sum_norm = "sequence_mean_token_sum_norm"


@dataclass(frozen=True, kw_only=True)
class PolicyLossNeeds:
    """What a policy loss needs of the settings around it."""

    aggregation: Aggregation | None  # the only one under which it is the loss of its paper; None: any
    # it weighs by new / old probability; without, it is right for the very policy that sampled: one update
    # per batch
    ratio: bool = True
    dual_clip: bool = False  # it reads `clip_dual`
    # `old_log_probs` of a whole mini-batch, before it is cut: they are computed before the update
    whole_mini_batch: bool = False


_OF_RESPONSES = Aggregation.sequence_mean_token_mean


class PolicyLossKind(Kind):
    needs: PolicyLossNeeds

    ppo_clip = "ppo_clip", PolicyLossNeeds(aggregation=None, dual_clip=True)  # clipped ratios of tokens
    gspo = "gspo", PolicyLossNeeds(aggregation=_OF_RESPONSES)  # one clipped ratio for a response
    gmpo = "gmpo", PolicyLossNeeds(aggregation=_OF_RESPONSES)  # the geometric mean of clipped ratios
    cispo = "cispo", PolicyLossNeeds(aggregation=None)  # the weight is clipped, not the token
    sapo = "sapo", PolicyLossNeeds(aggregation=_OF_RESPONSES)  # a soft limit instead of a clip
    gpg = "gpg", PolicyLossNeeds(aggregation=None, ratio=False)  # the log-prob, no ratio
    # ppo_clip without some tokens of high covariance
    clip_cov = "clip_cov", PolicyLossNeeds(aggregation=None, dual_clip=True, whole_mini_batch=True)
    # a KL penalty on the tokens of highest covariance
    kl_cov = "kl_cov", PolicyLossNeeds(aggregation=None, whole_mini_batch=True)
    # no update beyond a total variation
    dppo_tv = "dppo_tv", PolicyLossNeeds(aggregation=None, dual_clip=True)
    dppo_kl = "dppo_kl", PolicyLossNeeds(aggregation=None, dual_clip=True)  # no update beyond a KL divergence


@dataclass(frozen=True, kw_only=True)
class RolloutEngineNeeds:
    """What an engine needs of a machine and of a run.

    section: of `rollout`, with the engine's settings, None where there are none. What stands in its
    `server_args` is given to the engine's library as it is. memory_arg: which of these is the share of a GPU
    that the engine takes for weights and cache, whatever it needs.
    """

    packages: Mapping[str, str]  # with their versions, beside those that every run needs
    cuts_models: bool  # over several devices: `rollout.tensor_parallel_size` may be above 1
    # says which experts of each layer saw a token: `engine.routing_replay` may be rollout
    returns_routes: bool
    # every few seconds while a batch is on its way; else it answers when that is done, however long it takes
    answers_meanwhile: bool
    section: str | None
    memory_arg: str | None

    @property
    def memory_key(self) -> str | None:
        """The dotted key of that share in a configuration."""
        return None if self.memory_arg is None else f"rollout.{self.section}.server_args.{self.memory_arg}"


class RolloutEngineKind(Kind):
    needs: RolloutEngineNeeds

    # transformers in the worker's process: for tests and tiny models
    hf = (
        "hf",
        RolloutEngineNeeds(
            packages={},
            cuts_models=False,
            returns_routes=False,
            answers_meanwhile=False,
            section=None,
            memory_arg=None,
        ),
    )
    # for everything else
    sglang = (
        "sglang",
        RolloutEngineNeeds(
            packages=SGLANG,
            cuts_models=True,
            returns_routes=True,
            answers_meanwhile=True,
            section="sglang",
            memory_arg="mem_fraction_static",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LoggerNeeds:
    # that a user installs for a module of the logger's name; None: nothing that megarl does not need anyway
    package: str | None


class LoggerKind(Kind):
    needs: LoggerNeeds

    console = "console", LoggerNeeds(package=None)  # a line a step
    jsonl = "jsonl", LoggerNeeds(package=None)  # a file with every metric of every step
    tensorboard = "tensorboard", LoggerNeeds(package=None)  # its files of events
    wandb = "wandb", LoggerNeeds(package="wandb")  # Weights & Biases
    mlflow = "mlflow", LoggerNeeds(package="mlflow-skinny")  # an MLflow server or folder
    swanlab = "swanlab", LoggerNeeds(package="swanlab")  # SwanLab
