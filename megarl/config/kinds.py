"""Choices of the configuration whose members declare their requirements.

They are data that can be read without torch. The implementations are elsewhere: estimators and losses in
`megarl/algorithms`, engines in `megarl/rollout/engines.py`, loggers in `megarl/tracking/loggers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megarl.config.versions import SGLANG


class Kind(str, Enum):
    """Base of enumerations whose members have a name and a declaration of requirements.

    An example is `rloo = "rloo", EstimatorNeeds(compares_samples=True)`. A member without a declaration
    raises TypeError at import. Files, command lines and OmegaConf use the name. Rules, placement, roles and
    the documentation read `needs`, so none of them depends on a particular member. Implementations are
    registered by member in their own packages.
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
    """The requirements of an estimator in addition to the rewards of a batch.

    Attributes:
        compares_samples: It compares the samples of a prompt: `rollout.n` must be at least 2, and groups with
            equal scores have no signal.
        critic: It reads `values`.
        greedy_baseline: It reads `baseline_scores`, the score of an additional greedy response per prompt.
        outcomes: It reads rewards as outcomes, 0 or more, so nothing may be subtracted from them.
        score_parts: It reads `score_parts`, each reward function's score, instead of rewards with their
            penalties.
        old_log_probs: It reads the trainer's `old_log_probs`, so samples are scored before the update.
        sum_pi_squared: It reads `sum_pi_squared` of the trainer's probabilities, computed with
            `old_log_probs`.
        teacher: It reads `teacher_log_prob`, so the run has the role teacher.
        reward: It reads the rewards, so something must score the samples. Otherwise the scores are optional.
    """

    compares_samples: bool
    critic: bool = False
    greedy_baseline: bool = False
    outcomes: bool = False
    score_parts: bool = False
    old_log_probs: bool = False
    sum_pi_squared: bool = False
    teacher: bool = False
    reward: bool = True


class AdvantageEstimator(Kind):
    needs: EstimatorNeeds

    # generalized advantage estimation with a critic
    gae = "gae", EstimatorNeeds(compares_samples=False, critic=True)
    # the group's mean as baseline, scaled by its standard deviation
    grpo = "grpo", EstimatorNeeds(compares_samples=True)
    # the group's mean as baseline and as divisor
    maxrl = "maxrl", EstimatorNeeds(compares_samples=True, outcomes=True)
    # the best sample of the group against the second best
    grpo_pass_k = "grpo_pass_k", EstimatorNeeds(compares_samples=True)
    rloo = "rloo", EstimatorNeeds(compares_samples=True)  # leave-one-out mean of the group as baseline
    # discounted returns, whitened over the batch, without groups
    reinforce_plus_plus = "reinforce_plus_plus", EstimatorNeeds(compares_samples=False)
    # the group's mean as baseline, whitened over the batch
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline", EstimatorNeeds(compares_samples=True)
    opo = "opo", EstimatorNeeds(compares_samples=True)  # the group's length-weighted mean as baseline
    gpg = "gpg", EstimatorNeeds(compares_samples=True)  # the group's mean, rescaled for groups without signal
    # the score of a greedy response as baseline
    remax = "remax", EstimatorNeeds(compares_samples=False, greedy_baseline=True)
    # advantages of each reward function separately, then added
    gdpo = "gdpo", EstimatorNeeds(compares_samples=True, score_parts=True)
    # a baseline per token, weighted by the squared gradient norm
    optimal_token_baseline = (
        "optimal_token_baseline",
        EstimatorNeeds(compares_samples=True, old_log_probs=True, sum_pi_squared=True),
    )
    # the log-ratio of a teacher and the policy at each token, optionally mixed with rewards
    distillation = (
        "distillation",
        EstimatorNeeds(compares_samples=False, old_log_probs=True, teacher=True, reward=False),
    )


class Aggregation(str, Enum):
    token_mean = "token_mean"  # the mean over all tokens
    sequence_mean_token_sum = "sequence_mean_token_sum"  # the sum over a response, the mean over responses
    sequence_mean_token_mean = "sequence_mean_token_mean"  # the mean over a response, the mean over responses
    # the sum over a response divided by `norm_tokens`, the mean over responses
    sequence_mean_token_sum_norm = "sequence_mean_token_sum_norm"


@dataclass(frozen=True, kw_only=True)
class PolicyLossNeeds:
    """The requirements of a policy loss on other settings.

    Attributes:
        aggregations: The aggregations under which it is the loss of a paper; empty: any.
        ratio: It depends on new / old probability. A loss without a ratio is valid only for the policy that
            generated the samples, so for one update per batch.
        dual_clip: It reads `clip_dual`.
        own_weights: It weighs responses by the ratio of their policies itself, so importance weights of the
            rollout correction would count it again.
        whole_mini_batch: It reads `old_log_probs` of a whole mini-batch before it is split, so they are
            computed before the update.
    """

    aggregations: tuple[Aggregation, ...]
    ratio: bool = True
    dual_clip: bool = False
    own_weights: bool = False
    whole_mini_batch: bool = False


_OF_RESPONSES = (Aggregation.sequence_mean_token_mean,)


class PolicyLossKind(Kind):
    needs: PolicyLossNeeds

    ppo_clip = "ppo_clip", PolicyLossNeeds(aggregations=(), dual_clip=True)  # clipped ratio per token
    # one clipped ratio per response; the sum over its tokens is LUSPO's loss
    gspo = "gspo", PolicyLossNeeds(aggregations=(*_OF_RESPONSES, Aggregation.sequence_mean_token_sum))
    gmpo = "gmpo", PolicyLossNeeds(aggregations=_OF_RESPONSES)  # geometric mean of clipped ratios
    cispo = "cispo", PolicyLossNeeds(aggregations=())  # clips the weight and keeps every token's gradient
    sapo = "sapo", PolicyLossNeeds(aggregations=_OF_RESPONSES)  # a soft gate instead of a clip
    # a smooth weight of the response's ratio
    vespo = "vespo", PolicyLossNeeds(aggregations=(), own_weights=True)
    # the response's ratio, at most 1, for negative advantages alone
    topr = "topr", PolicyLossNeeds(aggregations=(), own_weights=True)
    # log-probs with a quadratic penalty of the log-ratio
    dro = "dro", PolicyLossNeeds(aggregations=())
    gpg = "gpg", PolicyLossNeeds(aggregations=(), ratio=False)  # policy gradient with log-probs, no ratio
    # ppo_clip without a fraction of the tokens with high covariance
    clip_cov = "clip_cov", PolicyLossNeeds(aggregations=(), dual_clip=True, whole_mini_batch=True)
    # KL penalty on the tokens with the highest covariance
    kl_cov = "kl_cov", PolicyLossNeeds(aggregations=(), whole_mini_batch=True)
    # no update of tokens beyond a total variation distance
    dppo_tv = "dppo_tv", PolicyLossNeeds(aggregations=(), dual_clip=True)
    # no update of tokens beyond a KL divergence
    dppo_kl = "dppo_kl", PolicyLossNeeds(aggregations=(), dual_clip=True)


@dataclass(frozen=True, kw_only=True)
class PairLossNeeds:
    """The inputs of the loss of a pair of answers.

    Attributes:
        reference: It compares the policy with a reference, whose log-probs are computed before training.
        per_token: It reads means over the tokens of an answer instead of sums.
        sft: It adds the negative log-likelihood of the preferred answer.
    """

    reference: bool
    per_token: bool
    sft: bool = False


class DPOLossKind(Kind):
    """The losses of a pair. The names are TRL's; r is the log-ratio of policy and reference of an answer."""

    needs: PairLossNeeds

    # -log sigmoid(beta * difference of r) (Rafailov et al. 2023)
    sigmoid = "sigmoid", PairLossNeeds(reference=True, per_token=False)
    # (difference of the mean r - 1 / (2 beta))^2 (Azar et al. 2023)
    ipo = "ipo", PairLossNeeds(reference=True, per_token=True)
    # -log sigmoid(beta * difference of the mean r), which does not favor long answers (Lambert et al. 2024)
    sigmoid_norm = "sigmoid_norm", PairLossNeeds(reference=True, per_token=True)
    # -log sigmoid(beta * difference of the mean log-probs - margin), without a reference (Meng et al. 2024)
    simpo = "simpo", PairLossNeeds(reference=False, per_token=True)
    # -log sigmoid(beta * difference of the log-probs), without a reference, and SFT (Xu et al. 2024)
    cpo = "cpo", PairLossNeeds(reference=False, per_token=False, sft=True)
    # -beta log sigmoid(difference of the log-odds), without a reference, and SFT (Hong et al. 2024)
    orpo = "orpo", PairLossNeeds(reference=False, per_token=True, sft=True)


# Switches of SGLang with which samples are not those of the weights. Workers get all SGLANG_ variables.
WRONG_SAMPLES = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "permutes the weights of experts after loading, but not in a sync",
    "SGLANG_FORCE_FP8_MARLIN": "repacks FP8 weights after loading, but not in a weight sync",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": "sends tokens to experts that no router selected",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "sends tokens to experts that no router selected",
    "SGLANG_SIMULATE_ACC_LEN": "accepts drafted tokens that the policy did not sample",
}


@dataclass(frozen=True, kw_only=True)
class RolloutEngineNeeds:
    """The requirements and capabilities of a rollout engine.

    Attributes:
        packages: Packages with version ranges, in addition to those that every run requires.
        cuts_models: It can shard a model over several devices, so `rollout.tensor_parallel_size` may be above
            1.
        returns_routes: It reports the experts of each layer and token, so `engine.routing_replay` may be
            rollout.
        answers_meanwhile: It responds every few seconds during a batch. Otherwise it responds when the batch
            is done.
        computes_fp8: It can have weights in FP8, so `rollout.dtype` may be fp8.
        serves_adapters: It applies LoRA adapters itself, so `actor.lora.sync` may be adapter.
        speculates: It can verify drafted tokens.
        wrong_switches: Environment variables with which its samples are not those of the weights, and why.
        section: The section of `rollout` with its settings, None if it has none. `server_args` in it is
            passed to the engine's library unchanged.
        memory_arg: The key of `server_args` that sets the share of a GPU that the engine reserves for weights
            and cache.
    """

    packages: Mapping[str, str]
    cuts_models: bool
    returns_routes: bool
    answers_meanwhile: bool
    computes_fp8: bool
    serves_adapters: bool
    speculates: bool
    wrong_switches: Mapping[str, str]
    section: str | None
    memory_arg: str | None

    @property
    def memory_key(self) -> str | None:
        """The dotted configuration key of the engine's share of a GPU."""
        return None if self.memory_arg is None else f"rollout.{self.section}.server_args.{self.memory_arg}"


class RolloutEngineKind(Kind):
    needs: RolloutEngineNeeds

    # transformers in the worker's process, for tests and tiny models
    hf = (
        "hf",
        RolloutEngineNeeds(
            packages={},
            cuts_models=False,
            returns_routes=False,
            answers_meanwhile=False,
            computes_fp8=False,
            serves_adapters=False,
            speculates=False,
            wrong_switches={},
            section=None,
            memory_arg=None,
        ),
    )
    # SGLang, for everything else
    sglang = (
        "sglang",
        RolloutEngineNeeds(
            packages=SGLANG,
            cuts_models=True,
            returns_routes=True,
            answers_meanwhile=True,
            computes_fp8=True,
            serves_adapters=True,
            speculates=True,
            wrong_switches=WRONG_SAMPLES,
            section="sglang",
            memory_arg="mem_fraction_static",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerNeeds:
    """The state of an optimizer, in addition to float32 master weights, and its settings.

    Attributes:
        title: The name in messages.
        moments: What it keeps for each element, by the names in the state of Megatron's optimizer, with
            Megatron's option for the dtype. The empty option: always float32.
        settings: Megatron's fields, with the key of `optim` that has the value, and its position if the key
            is a list.
        step_copies: Float32 tensors of the size of a rank's share that its step in torch allocates on CUDA.
    """

    title: str
    moments: Mapping[str, str]
    settings: Mapping[str, tuple[str, int | None]]
    step_copies: int


class OptimizerKind(Kind):
    """The optimizers, by Megatron's names. Each part of Megatron's optimizer has its own row."""

    needs: OptimizerNeeds

    adam = (
        "adam",
        OptimizerNeeds(
            title="AdamW",
            moments={"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"},
            settings={"adam_beta1": ("betas", 0), "adam_beta2": ("betas", 1), "adam_eps": ("eps", None)},
            step_copies=1,  # the square roots of all second moments
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TransportNeeds:
    """The devices that a transport of weights connects, and its costs.

    Buckets have `resharding.bucket_mb`.

    Attributes:
        trainer_buckets: The buckets that a trainer rank has in device memory.
        engine_buckets: The buckets that an engine rank has in device memory.
        shares_devices: Whether each engine rank needs a trainer rank on its device (True), or engines need
            devices without trainer ranks (False). None: they may run anywhere.
        keeps_buckets: Whether trainer ranks keep their buckets until a part of their state is offloaded.
            Otherwise they have them only during the sync.
        joins_groups: Whether trainer and engine ranks join process groups.
        through_files: Whether weights go through files, of which all replicas read the same. They have the
            dtype of the model, and SGLang's own loader reads them, also into a draft model.
        sends_changes: Whether it can send only the elements that changed (`resharding.delta`).
    """

    trainer_buckets: int = 0
    engine_buckets: int = 0
    shares_devices: bool | None = None
    keeps_buckets: bool = True
    joins_groups: bool = False
    through_files: bool = False
    sends_changes: bool = True


class Transport(Kind):
    """The transports of weights. The first one that works in a placement is chosen."""

    needs: TransportNeeds

    # device if every engine shares devices with trainers, group if none does
    auto = "auto", TransportNeeds()
    # shared device memory between a trainer rank and the engine rank on its device, on any number of nodes
    device = (
        "device",
        # two buckets of IPC buffers, and two messages of half a bucket to other trainers
        TransportNeeds(shares_devices=True, trainer_buckets=3, sends_changes=False),
    )
    # point-to-point transfers over the network, from trainers to engines on other devices
    group = (
        "group",
        TransportNeeds(shares_devices=False, trainer_buckets=2, engine_buckets=2, joins_groups=True),
    )
    # files in `trainer.output_dir`, which must be visible on all nodes
    folder = "folder", TransportNeeds(trainer_buckets=2, keeps_buckets=False, through_files=True)


@dataclass(frozen=True, kw_only=True)
class HubNeeds:
    """The package of a hub of environments.

    Attributes:
        package: What to install, with the version whose interface the adapter uses.
        module: The module that it provides.
    """

    package: str
    module: str


class Hub(Kind):
    """Collections of environments. The adapter of a hub is the module of its name in megarl/endpoint/hubs."""

    needs: HubNeeds

    # procedural tasks with verifiers
    reasoning_gym = "reasoning_gym", HubNeeds(package="reasoning-gym==0.1.25", module="reasoning_gym")
    # tasksets and harnesses of Prime Intellect
    verifiers = "verifiers", HubNeeds(package="verifiers==0.4.0", module="verifiers")
    # environment servers with reset and step
    openenv = "openenv", HubNeeds(package="openenv==0.10.0", module="openenv")
    # resources servers and agents of NVIDIA
    nemo_gym = "nemo_gym", HubNeeds(package="nemo-gym==0.4.0", module="nemo_gym")
    # tasks in containers with tests, such as Terminal-Bench
    harbor = "harbor", HubNeeds(package="harbor==0.26.0", module="harbor")


@dataclass(frozen=True, kw_only=True)
class LoggerNeeds:
    """The requirement of a logger.

    Attributes:
        package: What to install; None: included with megarl.
        module: The module that the package provides.
    """

    package: str | None
    module: str = ""


class LoggerKind(Kind):
    needs: LoggerNeeds

    console = "console", LoggerNeeds(package=None)  # one line per step
    jsonl = "jsonl", LoggerNeeds(package=None)  # a file with every metric of every step
    tensorboard = "tensorboard", LoggerNeeds(package=None)  # TensorBoard event files
    wandb = "wandb", LoggerNeeds(package="wandb", module="wandb")  # Weights & Biases
    mlflow = "mlflow", LoggerNeeds(package="mlflow-skinny", module="mlflow")  # an MLflow server or folder
    swanlab = "swanlab", LoggerNeeds(package="swanlab", module="swanlab")  # SwanLab
    # an HTTP endpoint that a Prometheus server scrapes
    prometheus = "prometheus", LoggerNeeds(package="prometheus-client", module="prometheus_client")
    # traces of steps and their phases, sent by OTLP over HTTP
    opentelemetry = (
        "opentelemetry",
        LoggerNeeds(
            package="opentelemetry-exporter-otlp-proto-http",
            module="opentelemetry.exporter.otlp.proto.http",
        ),
    )
