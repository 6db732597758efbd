"""How samples become a batch: padding, masks, positions and log-probs, from samples made by hand."""

from __future__ import annotations

from typing import Any

import torch

from megarl.config.schema import SamplingConfig
from megarl.protocol.batch import DataProto
from megarl.rollout.interface import Sample, SamplingParameters
from megarl.workers.rollout import Rollout, TokenRules

PAD, END = 0, 1
RULES = TokenRules(pad_token_id=PAD, stop_token_ids=(END,), max_response_length=6)


def prompts() -> DataProto:
    """Prompt 1 ends with the padding's id, a token like any other."""
    return DataProto.from_dict(
        {"prompts": torch.tensor([[0, 0, 7], [8, 9, 0]]), "prompt_attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])},
        {"uid": ["a", "b"], "data_source": ["one", "two"]},
    )


def sample(ids: list[int], log_probs: list[float]) -> Sample:
    return Sample(ids, log_probs, "stop", 3)


SAMPLES = [
    sample([5, 6, 4, END], [-0.1, -0.2, -0.3, -0.4]),
    sample([END], [-0.5]),
    sample([5, PAD, END], [-0.6, -0.7, -0.8]),  # it wrote the padding's id
    sample([6, 6], [-0.9, -1.0]),
]


def test_samples_become_a_batch() -> None:
    batch = Rollout(None, RULES, seed=0)._assemble(prompts().repeat(2), SAMPLES)  # type: ignore[arg-type]
    expected = {
        "prompts": [[0, 0, 7], [0, 0, 7], [8, 9, 0], [8, 9, 0]],
        "prompt_attention_mask": [[0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]],
        "responses": [[5, 6, 4, 1], [1, 0, 0, 0], [5, 0, 1, 0], [6, 6, 0, 0]],
        "input_ids": [[0, 0, 7, 5, 6, 4, 1], [0, 0, 7, 1, 0, 0, 0], [8, 9, 0, 5, 0, 1, 0], [8, 9, 0, 6, 6, 0, 0]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0]],
        "position_ids": [[0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 4, 4, 4]],
    }
    tensors = batch.tensors
    assert {key: tensors[key].tolist() for key in expected} == expected
    assert all(tensors[key].dtype == torch.int64 for key in expected)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    assert torch.equal(tensors["response_mask"], mask)
    log_probs = [[-0.1, -0.2, -0.3, -0.4], [-0.5, 0, 0, 0], [-0.6, -0.7, -0.8, 0], [-0.9, -1.0, 0, 0]]
    assert torch.equal(tensors["rollout_log_probs"], torch.tensor(log_probs))
    assert tensors.keys() == {*expected, "response_mask", "rollout_log_probs"}
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert batch.non_tensor_batch["data_source"].tolist() == ["one", "one", "two", "two"]


class Echo:
    """Stands in for a future of a replica: its samples are its prompts, reversed, `n` times."""

    def __init__(self, ids: list[list[int]], sampling: SamplingParameters) -> None:
        self.calls = ()
        self._samples = [sample(row[::-1], [-1.0] * len(row)) for row in ids for _ in range(sampling.n)]

    def get(self, timeout: float | None = None) -> list[Sample]:
        return self._samples


class Replicas:
    """Stands in for the group of rollout workers; remembers what each was asked."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.asked: dict[int, tuple[list[list[int]], SamplingParameters]] = {}

    def execute_rank_async(self, rank: int, method: str, ids: list[list[int]], sampling: SamplingParameters) -> Any:
        assert method == "generate"
        self.asked[rank] = (ids, sampling)
        return Echo(ids, sampling)


def generate(replicas: Replicas, step: int, n: int = 2) -> DataProto:
    return Rollout(replicas, RULES, seed=4).generate(prompts(), SamplingConfig(n=n, temperature=0.5, top_p=0.9, top_k=3), step)  # type: ignore[arg-type]


def test_prompts_are_dealt_without_their_padding_and_come_back_in_order() -> None:
    replicas = Replicas(2)
    batch = generate(replicas, step=1)
    assert [replicas.asked[rank][0] for rank in (0, 1)] == [[[7]], [[8, 9, 0]]]
    assert batch.tensors["responses"].tolist() == [[7, 0, 0], [7, 0, 0], [0, 9, 8], [0, 9, 8]]
    sampling = replicas.asked[0][1]
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k) == (2, 0.5, 0.9, 3)
    assert (sampling.max_new_tokens, sampling.stop_token_ids) == (6, (END,))


def test_replicas_without_a_prompt_are_not_asked() -> None:
    replicas = Replicas(5)
    assert len(generate(replicas, step=1)) == 4
    assert sorted(replicas.asked) == [0, 1]


def test_each_replica_and_step_draws_from_a_seed_of_its_own() -> None:
    seeds = []
    for step in (1, 2):
        generate(replicas := Replicas(2), step)
        seeds += [replicas.asked[rank][1].seed for rank in (0, 1)]
    assert len(set(seeds)) == 4
    generate(replicas := Replicas(2), 1)
    assert [replicas.asked[rank][1].seed for rank in (0, 1)] == seeds[:2]
