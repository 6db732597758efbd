"""The rollout role: workers that own an inference engine, and the handle that turns prompts into a batch of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.config.schema import Device, DType, SamplingConfig
from megarl.controller.dispatch import Dispatch, register
from megarl.controller.futures import gather
from megarl.controller.group import RoleGroup
from megarl.controller.worker import Worker
from megarl.data.padding import Padded, join, pad_right
from megarl.protocol.batch import DataProto
from megarl.protocol.weights import Manifest, WeightBucket
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngine, Sample, SamplingParameters


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    path: str
    dtype: DType
    device: Device
    max_concurrency: int
    trust_remote_code: bool


class RolloutWorker(Worker):
    """One replica. It holds no usable weights until the first weight update ends."""

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__()
        cuda = spec.device is Device.cuda or (spec.device is Device.auto and torch.cuda.is_available())
        self._engine: RolloutEngine = HFEngine(
            spec.path,
            dtype=getattr(torch, spec.dtype.value),
            device=torch.device("cuda" if cuda else "cpu"),
            max_concurrency=spec.max_concurrency,
            trust_remote_code=spec.trust_remote_code,
        )

    def generate(self, prompts: list[list[int]], sampling: SamplingParameters) -> list[Sample]:
        return self._engine.generate(prompts, sampling)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_weight_update(self, manifest: Manifest) -> None:
        self._engine.begin_weight_update(manifest)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_weights(self, buckets: list[WeightBucket]) -> None:
        for bucket in buckets:
            self._engine.load_weights(bucket)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_weight_update(self, version: int) -> None:
        self._engine.end_weight_update(version)


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What the tokenizer fixes for generation."""

    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    max_response_length: int


class Rollout:
    """All replicas. Prompts are dealt to them in order, in equal shares."""

    def __init__(self, group: RoleGroup, rules: TokenRules, seed: int) -> None:
        self.group = group
        self._rules = rules
        self._seed = seed

    def generate(self, prompts: DataProto, sampling: SamplingConfig, step: int) -> DataProto:
        """B = prompts x n rows, the samples of a prompt side by side: the prompts' arrays, the model's inputs (`prompts`,
        `responses`, `input_ids`, `attention_mask`, `position_ids`), `response_mask` and `rollout_log_probs` (B, R).

        R is the longest response. The same prompts, weights, seed and step give the same samples.
        """
        tokens = prompts.tensors
        ids = [row[mask.bool()].tolist() for row, mask in zip(tokens["prompts"], tokens["prompt_attention_mask"], strict=True)]
        replicas = range(min(self.group.world_size, len(ids)))
        bounds = np.linspace(0, len(ids), len(replicas) + 1).round().astype(int)
        futures = [
            self.group.execute_rank_async(rank, "generate", ids[bounds[rank] : bounds[rank + 1]], self._parameters(sampling, step, rank))
            for rank in replicas
        ]
        samples = [sample for replica in gather(*futures) for sample in replica]
        return self._assemble(prompts.repeat(sampling.n), samples)

    def _parameters(self, sampling: SamplingConfig, step: int, replica: int) -> SamplingParameters:
        return SamplingParameters(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=self._rules.max_response_length,
            stop_token_ids=self._rules.stop_token_ids,
            seed=int(np.random.SeedSequence([self._seed, step, replica]).generate_state(1)[0]),
        )

    def _assemble(self, prompts: DataProto, samples: Sequence[Sample]) -> DataProto:
        assert len(samples) == len(prompts)
        width = max(len(sample.token_ids) for sample in samples)
        responses = pad_right([sample.token_ids for sample in samples], width, self._rules.pad_token_id)
        log_probs = torch.zeros(len(samples), width)
        log_probs[responses.mask.bool()] = torch.tensor([value for sample in samples for value in sample.log_probs])
        masks = prompts.tensors["prompt_attention_mask"]
        tensors = {
            **join(Padded(prompts.tensors["prompts"], masks), responses),
            "prompt_attention_mask": masks,
            "response_mask": responses.mask.bool(),
            "rollout_log_probs": log_probs,
        }
        return DataProto.from_dict(tensors, prompts.non_tensor_batch, prompts.meta_info)
