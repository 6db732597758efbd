"""Test on-policy distillation.

The gradient of an update, from the teacher's forward pass to the student's backward pass, is that of a float64
reference in every kind of layout. A student of another size than its teacher trains.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megarl.algorithms.groups import place_scores
from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import merge_metrics, values_of
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import TEACHER_PROMPTS, TEACHER_TOP_IDS, TEACHER_TOP_LOG_PROBS
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    DistillationConfig,
    DistillationKL,
    KLConfig,
    KLWhere,
    MicroBatchConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    PromptColumnsConfig,
    SourceTeacherConfig,
    TeacherConfig,
)
from megarl.roles.models import actor_rows
from megarl.roles.start import PPORoles
from megarl.trainers.advantages import AdvantageStep
from tests.families import example_config
from tests.integration.tiny_run import SYMBOLS, run_ppo, save_inputs, save_policy, tiny_config
from tests.ranks import RankPool, gather
from tests.unit.engine.comparison import assert_same, max_difference
from tests.unit.engine.models import (
    VOCAB_SIZE,
    load_lm,
    make_batch,
    reference_logits,
    save_model,
    scores_of,
)
from tests.unit.engine.rank_side import (
    ALL_LAYOUTS,
    Tensors,
    build,
    deal,
    hf_gradients,
    join_rows,
    merge,
    start,
    take,
)

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine

NUM_ROWS = 8
RESPONSE_LENGTH = 9
UIDS = ["a", "a", "b", "b", "b", "c", "c", "c"]
SCORES = [1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 0.25, 0.25]
TEMPERATURE = 0.8
COEFFICIENT = 0.5
REWARD_WEIGHT = 0.25
TOLERANCE = 1e-5  # relative to a tensor's norm, as in the parity tests
FLOOR = 1e-4  # relative to the whole gradient's norm
LARGEST_DIFFERENCE = 1e-6  # of any element
_SAMPLED = DistillationConfig(coefficient=COEFFICIENT, reward_weight=REWARD_WEIGHT)
# The policy has no tokens beyond the last variant's.
VARIANTS: dict[str, DistillationConfig] = {
    "sampled tokens": _SAMPLED,
    "reverse": replace(_SAMPLED, top_k=8),
    "forward": replace(_SAMPLED, top_k=8, kl=DistillationKL.forward),
    "without rewards": replace(_SAMPLED, top_k=3, reward_weight=0.0),
    "the whole vocabulary": replace(_SAMPLED, top_k=VOCAB_SIZE),
}


def algorithm_of(section: DistillationConfig) -> AlgorithmConfig:
    advantage = AdvantageConfig(estimator=AdvantageEstimator.distillation, distillation=section)
    return AlgorithmConfig(advantage=advantage, kl=KLConfig(where=KLWhere.none))


# ---- the gradient of an update


class Update(NamedTuple):
    gradients: Tensors
    reverse_kl: float
    loss: float
    top_k_kl: float  # 0 with sampled tokens
    top_k_mass: float


def save_teacher(folder: Path) -> None:
    """Save a Llama that is wider than the student and has as many layers as two stages can share.

    It has more rows in its vocabulary, as models that are padded differently.
    """
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        example_config(
            "llama", **sizes, **heads, rope_scaling=None, rope_theta=1e4, vocab_size=VOCAB_SIZE + 9
        ),
        dtype=torch.float32,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that log-probs differ by nats
    model.save_pretrained(folder)


def run_updates(
    parallel: ParallelConfig, student: str, teacher: str, batch: Tensors
) -> dict[str, tuple[Any, ...]]:
    """Run in a rank: score with both models, compute advantages like the driver, and the gradients."""
    groups = start(parallel)
    policy = build(groups, student, optim=OptimConfig(), temperature=TEMPERATURE)
    frozen = build(groups, teacher, temperature=TEMPERATURE)
    return {name: tuple(run_update(policy, frozen, batch, section)) for name, section in VARIANTS.items()}


def run_update(
    policy: MegatronEngine, teacher: MegatronEngine, batch: Tensors, section: DistillationConfig
) -> Update:
    from megarl.engine.top_tokens import TopK

    rows = list(range(NUM_ROWS))
    k = section.top_k

    def scored(engine: MegatronEngine, top: TopK | None = None) -> Tensors:
        return join_rows(rows, engine.forward(take(batch, rows), deal(NUM_ROWS, 2), (), top), NUM_ROWS)

    old = scored(policy)["log_probs"]
    of_teacher = scored(teacher, None if k is None else TopK(k, VOCAB_SIZE))
    columns = {**batch, "old_log_probs": old, "teacher_log_prob": of_teacher["log_probs"]}
    made, metrics = with_advantages(columns, section)
    lengths = made.ragged["responses"].lengths
    if k is not None:
        made = made.union(
            DataProto.from_dict(
                {
                    TEACHER_TOP_IDS: RaggedTensor.from_padded(of_teacher["top_ids"], k * lengths),
                    TEACHER_TOP_LOG_PROBS: RaggedTensor.from_padded(
                        of_teacher["top_log_probs"], (k + 1) * lengths
                    ),
                }
            )
        )
    algorithm = algorithm_of(section)
    trained = actor_rows(made, algorithm, one_update=True, seed=0).ragged
    loss = ActorLoss(algorithm=algorithm, counts=MiniBatchCounts.of(trained["response_mask"]))
    found = policy.forward_backward(trained, deal(NUM_ROWS, 2), loss, loss.extras)
    groups = policy.groups
    gathered = gather(found if groups.tensor_rank == groups.context_rank == 0 else {})
    values = values_of(merge_metrics(gathered))
    return Update(
        hf_gradients(policy),
        metrics["distillation/reverse_kl/mean"],
        values["actor/pg_loss"],
        values.get("actor/top_k_kl", 0.0),
        values.get("actor/top_k_mass", 0.0),
    )


def with_advantages(batch: Tensors, section: DistillationConfig) -> tuple[DataProto, dict[str, float]]:
    scores = {"token_level_scores": place_scores(SCORES, batch["response_mask"])}
    made = DataProto.from_dict({**batch, **scores}, {"uid": UIDS})
    return AdvantageStep(algorithm_of(section), max_response_length=RESPONSE_LENGTH)(made)


def reference_updates(student: Path, teacher: Path, batch: Tensors) -> dict[str, Update]:
    """Compute the same updates with Hugging Face in float64."""
    policy, frozen = (load_lm(folder, torch.float64) for folder in (student, teacher))
    logits = reference_logits(policy, batch) / TEMPERATURE
    with torch.no_grad():
        of_teacher = reference_logits(frozen, batch) / TEMPERATURE
    return {
        name: reference_update(policy, logits, of_teacher, batch, section)
        for name, section in VARIANTS.items()
    }


def reference_update(
    policy: torch.nn.Module,
    logits: torch.Tensor,
    of_teacher: torch.Tensor,
    batch: Tensors,
    section: DistillationConfig,
) -> Update:
    mask = batch["response_mask"]
    log_probs = scores_of(logits, batch)["log_probs"]
    difference = (log_probs.detach() - scores_of(of_teacher, batch)["log_probs"])[mask]

    # The advantage of GRPO by hand: (score - mean) / (unbiased deviation + 1e-6); equal scores have none.
    scores = torch.tensor(SCORES, dtype=torch.float64)
    compared = torch.zeros(NUM_ROWS, dtype=torch.float64)
    for uid in ("a", "b"):
        group = [row for row, other in enumerate(UIDS) if other == uid]
        compared[group] = (scores[group] - scores[group].mean()) / (scores[group].std() + 1e-6)
    advantages = section.reward_weight * compared[:, None].expand(mask.shape)[mask]

    kl = torch.zeros(1, dtype=torch.float64)
    mass = torch.zeros(1, dtype=torch.float64)
    if section.top_k is None:
        advantages = advantages - COEFFICIENT * difference
    else:
        kl, mass = reference_top_k_kl(logits[mask], of_teacher[mask], section.top_k, section.kl)

    # With one update, the ratio is 1, and its gradient is that of the log-prob.
    loss = COEFFICIENT * kl.mean() - (advantages * log_probs[mask]).mean()
    policy.zero_grad()
    loss.backward(retain_graph=True)
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    return Update(
        {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None},
        float(difference.mean()),
        -float(advantages.mean()),
        float(kl.detach().mean()),
        float(mass.mean()),
    )


def reference_top_k_kl(
    logits: torch.Tensor, of_teacher: torch.Tensor, k: int, direction: DistillationKL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n,) each: the divergence over k tokens and the rest, and the teacher's mass on the k tokens."""
    policy = logits.softmax(-1)
    teacher = of_teacher.softmax(-1)
    ids = teacher[:, : policy.shape[1]].topk(k).indices
    ours, theirs = (each.gather(1, ids) for each in (policy, teacher))
    mass = theirs.sum(-1)
    if k < policy.shape[1]:
        ours, theirs = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], 1) for each in (ours, theirs))
    if direction is DistillationKL.reverse:
        return (ours * (ours / theirs).log()).sum(-1), mass
    return (theirs * (theirs / ours).log()).sum(-1), mass


class Setting(NamedTuple):
    student: Path
    teacher: Path
    batch: Tensors
    expected: dict[str, Update]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("distillation")
    save_model("qwen2-tied", folder / "student")
    save_teacher(folder / "teacher")
    batch = make_batch(num_rows=NUM_ROWS, response_length=RESPONSE_LENGTH)
    batch["response_mask"][0, 2:4] = False  # written by a tool
    return Setting(
        folder / "student",
        folder / "teacher",
        batch,
        reference_updates(folder / "student", folder / "teacher", batch),
    )


@pytest.mark.parametrize("layout", ["TP1", "TP2", "PP2", "CP2"])
def test_the_gradients_of_updates_are_those_of_a_float64_reference(
    setting: Setting, layout: str, rank_pool: RankPool
) -> None:
    parallel = ALL_LAYOUTS[layout]
    ranks = rank_pool.run(
        run_updates,
        world_size=parallel.world_size,
        parallel=parallel,
        student=str(setting.student),
        teacher=str(setting.teacher),
        batch=setting.batch,
    )
    for name, expected in setting.expected.items():
        updates = [Update(*rank[name]) for rank in ranks]
        norm = math.sqrt(sum(float(each.norm()) ** 2 for each in expected.gradients.values()))
        assert abs(expected.reverse_kl) > 0.5

        for update in updates:
            for value, wanted in zip(update[1:], expected[1:], strict=True):
                assert value == pytest.approx(wanted, rel=1e-5, abs=1e-7), name
        found = merge([update.gradients for update in updates])
        assert_same(found, expected.gradients, TOLERANCE, floor=FLOOR * norm)
        for tensor, wanted in expected.gradients.items():
            assert max_difference(found[tensor], wanted) <= LARGEST_DIFFERENCE, (name, tensor)


# ---- a run


STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `save_inputs`, and a `teacher/` that is wider and shallower, with a padded vocabulary."""
    save_inputs(folder := tmp_path_factory.mktemp("inputs"))
    config = Qwen2Config(
        vocab_size=len(SYMBOLS) + 3,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    torch.manual_seed(5)
    Qwen2ForCausalLM(config).float().save_pretrained(folder / "teacher")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / "policy" / file, folder / "teacher")
    return folder


def distilled(inputs: Path, output_dir: Path, reward_weight: float, **changes: Any) -> PPOConfig:
    section = DistillationConfig(reward_weight=reward_weight)
    advantage = AdvantageConfig(estimator=AdvantageEstimator.distillation, distillation=section)
    config = tiny_config(
        inputs,
        output_dir,
        algorithm=AlgorithmConfig(advantage=advantage, kl=KLConfig(where=KLWhere.none)),
        teacher=TeacherConfig(
            path=str(inputs / "teacher"),
            parallel=ParallelConfig(tensor_parallel_size=2),
            micro_batch=MicroBatchConfig(max_tokens=64),
        ),
        trainer={"total_steps": STEPS, "validate_before": False},
    )
    return replace(config, **changes)


@pytest.mark.usefixtures("ray_cluster")
def test_a_student_of_another_size_approaches_its_teacher_without_rewards(
    inputs: Path, tmp_path: Path
) -> None:
    tokens = [[2, 5, 14, 3], [2, 7, 8, 14, 3]], [[6, 7, 1], [9, 4]]
    rows = DataProto.from_dict(
        {
            "prompts": RaggedTensor.of_rows(tokens[0], torch.int32, on_left=True),
            "responses": RaggedTensor.of_rows(tokens[1], torch.int32),
            "response_mask": RaggedTensor.of_rows([[True] * 3, [True] * 2], torch.bool),
        }
    )
    scored: list[torch.Tensor] = []

    def look(step: int, roles: PPORoles) -> None:
        if step in (1, STEPS):
            scored.append(roles.teacher.log_probs(rows).get().ragged["teacher_log_prob"].flat())

    config = distilled(inputs, tmp_path, reward_weight=0.0)
    lines = run_ppo(replace(config, reward=replace(config.reward, functions=[])), look).metrics

    # The teacher has the log-probs of Hugging Face, and does not train.
    teacher = AutoModelForCausalLM.from_pretrained(inputs / "teacher", dtype=torch.float64)
    expected = []
    for prompt, response in zip(*tokens, strict=True):
        logits = teacher(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected += [float(logits[len(prompt) - 1 + at, token]) for at, token in enumerate(response)]
    for each in scored:
        assert each.tolist() == pytest.approx(expected, abs=1e-4)

    divergence = [line["distillation/reverse_kl/mean"] for line in lines]
    assert len(divergence) == STEPS
    assert divergence[-1] < 0.7 * divergence[0]
    assert all(line["actor/grad_norm"] > 0 and line["timing_s/teacher"] > 0 for line in lines)
    # Nothing scores the samples; the advantage of a token is minus its log-ratio.
    assert all(line["critic/score/mean"] == 0 for line in lines)
    for line in lines:
        assert line["critic/advantages/mean"] == pytest.approx(
            -line["distillation/reverse_kl/mean"], rel=1e-4
        )


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("top_k", [None, 4])
def test_a_policy_that_is_its_own_teacher_sees_another_prompt(
    inputs: Path, tmp_path: Path, top_k: int | None
) -> None:
    """The teacher has the policy's first weights, and sees a longer prompt."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "policy", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that the hint makes a difference
    shutil.copytree(inputs / "policy", tmp_path / "policy")
    model.save_pretrained(tmp_path / "policy")
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    for row in rows:
        question = row["prompt"][-1]["content"]
        row["with_hint"] = [{"role": "user", "content": question + question[::-1] + question}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = distilled(inputs, tmp_path / "out", reward_weight=0.0)
    advantage = config.algorithm.advantage
    section = replace(advantage.distillation, top_k=top_k)
    config = replace(
        config,
        data=replace(
            config.data,
            train_files=[str(tmp_path / "train.parquet")],
            columns=PromptColumnsConfig(teacher_prompt="with_hint"),
            max_prompt_length=20,
        ),
        algorithm=replace(config.algorithm, advantage=replace(advantage, distillation=section)),
        model=replace(config.model, path=str(tmp_path / "policy")),
        teacher=replace(config.teacher, path=str(tmp_path / "policy")),
        reward=replace(config.reward, functions=[]),
        trainer=replace(config.trainer, total_steps=2),
    )

    prompts = [[2, 5, 14, 3], [2, 7, 8, 14, 3]]
    hinted = [[2, 5, 5, 6, 14, 3], [2, 7, 14, 3]]
    responses = [[6, 7, 1], [9, 4]]
    batch = DataProto.from_dict(
        {
            "prompts": RaggedTensor.of_rows(prompts, torch.int32, on_left=True),
            TEACHER_PROMPTS: RaggedTensor.of_rows(hinted, torch.int32, on_left=True),
            "responses": RaggedTensor.of_rows(responses, torch.int32),
            "response_mask": RaggedTensor.of_rows([[True] * 3, [True] * 2], torch.bool),
        }
    )
    scored: list[torch.Tensor] = []

    def look(step: int, roles: PPORoles) -> None:
        if step == 1:
            scored.append(roles.teacher.log_probs(batch).get().ragged["teacher_log_prob"].flat())

    lines = run_ppo(config, look).metrics

    teacher = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
    expected = []
    for prompt, response in zip(hinted, responses, strict=True):
        logits = teacher(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected += [float(logits[len(prompt) - 1 + at, token]) for at, token in enumerate(response)]
    assert scored[0].tolist() == pytest.approx(expected, abs=1e-4)

    # In the first step, only the prompts differ.
    metric = "distillation/reverse_kl/mean" if top_k is None else "actor/top_k_kl"
    assert lines[0][metric] > 0.05
    assert all(line["actor/grad_norm"] > 0 for line in lines)


@pytest.mark.usefixtures("ray_cluster")
def test_two_teachers_score_the_rows_of_their_data_sources(inputs: Path, tmp_path: Path) -> None:
    """The policy learns from the most likely tokens of both, and from rewards, in one update per step."""
    save_policy(tmp_path / "other", seed=3, num_layers=2)
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    mixed = [row | {"data_source": ("even", "odd")[index % 2]} for index, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(mixed), tmp_path / "train.parquet")
    config = distilled(inputs, tmp_path / "out", reward_weight=0.1)
    section = replace(config.algorithm.advantage.distillation, top_k=4)
    advantage = replace(config.algorithm.advantage, distillation=section)
    even = SourceTeacherConfig(
        name="even",
        path=config.teacher.path,
        parallel=config.teacher.parallel,
        micro_batch=config.teacher.micro_batch,
        data_sources=["even"],
    )
    odd = SourceTeacherConfig(name="odd", path=str(tmp_path / "other"), data_sources=["odd"])
    config = replace(
        config,
        data=replace(config.data, train_files=[str(tmp_path / "train.parquet")]),
        algorithm=replace(config.algorithm, advantage=advantage),
        teacher=TeacherConfig(),
        teachers=[even, odd],
        trainer=replace(config.trainer, total_steps=STEPS),
    )
    tokens = [[2, 5, 14, 3], [2, 7, 8, 14, 3], [2, 4, 14, 3]], [[6, 7, 1], [9, 4], [5]]
    batch = DataProto.from_dict(
        {
            "prompts": RaggedTensor.of_rows(tokens[0], torch.int32, on_left=True),
            "responses": RaggedTensor.of_rows(tokens[1], torch.int32),
            "response_mask": RaggedTensor.of_rows([[True] * len(row) for row in tokens[1]], torch.bool),
        },
        {"data_source": ["odd", "even", "odd"]},
    )
    scored: list[DataProto] = []

    def look(step: int, roles: PPORoles) -> None:
        if step == 1:
            scored.append(roles.teacher.log_probs(batch).get())
            with pytest.raises(ValueError, match="row 1 of the batch has data_source 'prime', which no"):
                roles.teacher.log_probs(
                    DataProto.from_dict(batch.columns, {"data_source": ["odd", "prime", "odd"]})
                )

    lines = run_ppo(config, look).metrics
    (found,) = scored
    folders = [str(odd.path), str(even.path), str(odd.path)]
    for row, (folder, prompt, response) in enumerate(zip(folders, *tokens, strict=True)):
        teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            logits = teacher(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_softmax = logits.log_softmax(-1)
        top = log_softmax[:, : len(SYMBOLS)].topk(4)
        rest = log_softmax.scatter(1, top.indices, -math.inf).logsumexp(1, keepdim=True)
        own = {key: list(column.each())[row] for key, column in found.ragged.items()}
        expected = log_softmax.gather(1, torch.tensor(response)[:, None])[:, 0]
        assert own["teacher_log_prob"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
        assert own[TEACHER_TOP_IDS].tolist() == top.indices.flatten().tolist()
        assert own[TEACHER_TOP_LOG_PROBS].tolist() == pytest.approx(
            torch.cat([top.values, rest], 1).flatten().tolist(), abs=1e-4
        )

    assert lines[-1]["actor/top_k_kl"] < 0.95 * lines[0]["actor/top_k_kl"]
    for line in lines:
        assert "distillation/reverse_kl/mean" in line
        assert 0 < line["actor/top_k_mass"] < 1
        assert line["timing_s/teacher_even"] > 0 < line["timing_s/teacher_odd"]
        # The update's own pass scores the samples, except those of the first comparison with the engine.
        assert line["step"] == 1 or "timing_s/old_log_prob" not in line
        # Advantages are those of the rewards alone, whose groups have a mean of 0.
        assert abs(line["critic/advantages/max"]) <= 0.1 * 2
    assert any(line["critic/advantages/max"] > 0 for line in lines)


@pytest.mark.usefixtures("ray_cluster")
def test_rewards_mix_with_the_teacher(inputs: Path, tmp_path: Path) -> None:
    config = distilled(inputs, tmp_path, reward_weight=1.0)
    lines = run_ppo(replace(config, trainer=replace(config.trainer, total_steps=2))).metrics
    for line in (line for line in lines if line["step"] > 0):
        assert line["critic/score/max"] > 0
        # Group-relative advantages change what the teacher's term would be alone.
        assert line["critic/advantages/mean"] != pytest.approx(
            -line["distillation/reverse_kl/mean"], rel=1e-3
        )
