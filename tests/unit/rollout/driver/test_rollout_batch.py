"""Test the conversion of hand-made samples to a batch: padding, masks, positions and log-probs."""

from __future__ import annotations

import numpy as np
import torch

from megarl.agents.trajectory import Sample, VersionSpan
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import ROUTED_EXPERTS
from megarl.config.schema import SamplingConfig
from megarl.controller.worker import RemoteMethod
from megarl.rollout.driver.replicas import unshared
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.sample_rows import sample_rows, with_prompts
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.interface import EndedRequest, GenerationRequest
from megarl.rollout.worker.rollout_worker import RolloutWorker
from tests.fake_engine import plain_sample

PAD = 0
END = 1
RULES = TokenRules(pad_token_id=PAD, stop_token_ids=(END,), max_response_length=6)


def prompts() -> DataProto:
    """Return prompts. Prompt 1 ends with the padding id, which is a token like any other."""
    return DataProto.from_dict(
        {"prompts": RaggedTensor.of_rows([[7], [8, 9, 0]], torch.int32, padding=PAD, on_left=True)},
        {"uid": ["a", "b"], "data_source": ["one", "two"]},
    )


def sample(ids: list[int], log_probs: list[float]) -> Sample:
    return plain_sample(ids, log_probs, "stop", 3)


SAMPLES = [
    sample([5, 6, 4, END], [-0.1, -0.2, -0.3, -0.4]),
    sample([END], [-0.5]),
    sample([5, PAD, END], [-0.6, -0.7, -0.8]),  # the model wrote the padding id
    plain_sample([6, 6], [-0.9, -1.0], "length", 5)._replace(spans=(VersionSpan(4, 1), VersionSpan(5, 2))),
]


def test_samples_become_a_batch() -> None:
    batch = with_prompts(prompts(), sample_rows(SAMPLES), version=5, pad_token_id=PAD)
    expected = {
        "prompts": [[0, 0, 7], [0, 0, 7], [8, 9, 0], [8, 9, 0]],
        "prompt_attention_mask": [[0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]],
        "responses": [[5, 6, 4, 1], [1, 0, 0, 0], [5, 0, 1, 0], [6, 6, 0, 0]],
        "input_ids": [
            [0, 0, 7, 5, 6, 4, 1],
            [0, 0, 7, 1, 0, 0, 0],
            [8, 9, 0, 5, 0, 1, 0],
            [8, 9, 0, 6, 6, 0, 0],
        ],
        "attention_mask": [
            [0, 0, 1, 1, 1, 1, 1],
            [0, 0, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1, 0, 0],
        ],
        "position_ids": [
            [0, 0, 0, 1, 2, 3, 4],
            [0, 0, 0, 1, 1, 1, 1],
            [0, 1, 2, 3, 4, 5, 5],
            [0, 1, 2, 3, 4, 4, 4],
        ],
    }
    tensors = batch.tensors
    assert {key: tensors[key].tolist() for key in expected} == expected
    assert all(tensors[key].dtype == torch.int64 for key in expected)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    assert torch.equal(tensors["response_mask"], mask)
    log_probs = [[-0.1, -0.2, -0.3, -0.4], [-0.5, 0, 0, 0], [-0.6, -0.7, -0.8, 0], [-0.9, -1.0, 0, 0]]
    assert torch.equal(tensors["rollout_log_probs"], torch.tensor(log_probs))
    assert tensors["token_versions"].tolist() == [
        [3, 3, 3, 3],
        [3, -1, -1, -1],
        [3, 3, 3, -1],
        [4, 5, -1, -1],
    ]
    assert tensors["token_versions"].dtype == torch.int32
    assert tensors.keys() == {"prompts", "responses", "response_mask", "rollout_log_probs", "token_versions"}
    assert tensors.keys() == batch.ragged.keys()
    assert batch.meta_info == {"weight_version": 5}
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert batch.non_tensor_batch["data_source"].tolist() == ["one", "one", "two", "two"]
    assert batch.non_tensor_batch["weight_version"].tolist() == [3, 3, 3, 4]  # the oldest
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["stop", "stop", "stop", "length"]
    routes = [np.full(2 * place, place, np.uint8) for place in range(1, 5)]
    routed = [each._replace(routed_experts=row) for each, row in zip(SAMPLES, routes, strict=True)]
    with_routes = with_prompts(prompts(), sample_rows(routed), version=5, pad_token_id=PAD)
    assert with_routes.ragged[ROUTED_EXPERTS] == RaggedTensor.of_rows(routes, torch.uint8)


class Answer:
    """Stub for a completed call: its samples are the prompts, reversed."""

    def __init__(self, requests: list[GenerationRequest]) -> None:
        self.calls = ()
        self._finished: list[EndedRequest] = [
            (request.request_id, sample(request.prompt[::-1], [-1.0] * len(request.prompt)))
            for request in requests
        ]

    def get(self, timeout: float | None = None) -> list[EndedRequest]:
        return self._finished


class Group:
    """Stub for the worker group of a replica that records its calls."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    def call(self, method: RemoteMethod, requests: list[GenerationRequest], wait_s: float) -> Answer:
        assert method is RolloutWorker.submit_and_poll
        self.asked += requests
        return Answer(requests)


class StubReplicas:
    """Stub for Replicas."""

    def __init__(self, count: int) -> None:
        self.groups = [Group() for _ in range(count)]
        self.starting: set[int] = set()
        self.num_restarts = 0
        self.exclusive = unshared

    def __len__(self) -> int:
        return len(self.groups)


class StubWeights:
    """Stub for RolloutWeights: the engines have them."""

    version = 3

    def bring_in(self) -> None: ...

    def can_readmit(self) -> bool:
        return True

    def readmit(self, number: int) -> bool:
        raise AssertionError("no replica is restarted")


LIMITS = {"max_concurrency": 2, "answer_limit_s": 60, "sample_limit_s": 60}


def rollout(num_replicas: int) -> Rollout:
    weights = StubWeights()
    scheduler = RequestScheduler(StubReplicas(num_replicas), weights.readmit, **LIMITS)  # type: ignore[arg-type]
    return Rollout(scheduler, weights, RULES, seed=4)  # type: ignore[arg-type]


def asked(rollout: Rollout) -> list[list[GenerationRequest]]:
    return [replica.asked for replica in rollout.replicas]  # type: ignore[attr-defined]


def generate(rollout: Rollout, step: int, n: int = 2) -> DataProto:
    return rollout.generate(
        prompts(), SamplingConfig(n=n, temperature=0.5, top_p=0.9, top_k=3, min_new_tokens=1), step
    )


def test_prompts_are_dealt_without_their_padding_and_come_back_in_order() -> None:
    batch = generate(whole := rollout(2), step=1, n=3)
    assert [[request.prompt for request in one] for one in asked(whole)] == [
        [[7], [7], [8, 9, 0]],
        [[7], [8, 9, 0], [8, 9, 0]],
    ]
    assert batch.tensors["responses"].tolist() == [[7, 0, 0]] * 3 + [[0, 9, 8]] * 3
    sampling = asked(whole)[0][0].sampling
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_new_tokens) == (
        1,
        0.5,
        0.9,
        3,
        1,
    )
    assert (sampling.max_new_tokens, sampling.stop_token_ids) == (6, (END,))


def test_replicas_without_a_request_are_not_asked() -> None:
    generate(whole := rollout(5), step=1)
    assert [len(one) for one in asked(whole)] == [1, 1, 1, 1, 0]


def test_each_sample_and_step_has_a_seed_of_its_own_whatever_the_replicas_are() -> None:
    def seeds(num_replicas: int, step: int) -> list[int]:
        generate(whole := rollout(num_replicas), step)
        return [
            request.sampling.seed
            for request in sorted(
                (request for one in asked(whole) for request in one), key=lambda request: request.request_id
            )
        ]

    assert len({*seeds(1, 1), *seeds(1, 2)}) == 8
    assert seeds(1, 1) == seeds(2, 1) == seeds(5, 1)
