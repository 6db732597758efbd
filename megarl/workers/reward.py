"""The reward role: the user's functions, in processes of their own, and a reward model; a sample's score is their weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.scores import place_scores
from megarl.config.schema import RewardConfig
from megarl.controller.dispatch import Dispatch, register
from megarl.controller.futures import DerivedFuture, RemoteFuture
from megarl.controller.group import RoleGroup
from megarl.controller.worker import Worker
from megarl.data.tokenizer import load_tokenizer
from megarl.protocol.batch import DataProto
from megarl.rewards.scorer import RewardScorer, ScoreReport, ScoreRequest
from megarl.workers.reward_model import RewardModel


class RewardWorker(Worker):
    """One process that decodes responses and has them scored by the functions. Without functions it only decodes."""

    def __init__(self, config: RewardConfig, tokenizer_path: str, trust_remote_code: bool) -> None:
        super().__init__()
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        self._scorer = (
            RewardScorer(config.functions, config.time_limit_s, config.max_error_rate, config.num_processes) if config.functions else None
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def score(self, batch: DataProto) -> DataProto:
        """`token_level_scores` (B, R), `score_parts` (B, K) of the K reward functions before their weights, and the arrays
        `response_text`, `score` and `answer` (what a function took for it, else the whole text).

        Raises RewardError above the allowed error rate.
        """
        mask = batch.tensors["response_mask"]
        texts = [
            self._tokenizer.decode(ids[real], skip_special_tokens=True) for ids, real in zip(batch.tensors["responses"], mask, strict=True)
        ]
        arrays = batch.non_tensor_batch
        requests = [
            ScoreRequest(
                uid=str(uid), data_source=source, solution_str=text, ground_truth=reward_model["ground_truth"], extra_info=extra_info
            )
            for uid, source, text, reward_model, extra_info in zip(
                arrays["uid"], arrays["data_source"], texts, arrays["reward_model"], arrays["extra_info"], strict=True
            )
        ]
        report = self._scorer.score(requests) if self._scorer else _no_scores(len(requests))
        return DataProto.from_dict(
            tensors={
                "token_level_scores": place_scores(report.scores, mask),
                "score_parts": torch.tensor(report.parts, dtype=torch.float32),
            },
            non_tensors={
                "response_text": texts,
                "score": list(report.scores),
                "answer": [text if answer is None else answer for text, answer in zip(texts, report.answers, strict=True)],
            },
            meta_info={"reward/error_rate": len(report.errors) / len(requests)},
        )


def _no_scores(num_samples: int) -> ScoreReport:
    return ScoreReport(scores=[0.0] * num_samples, metrics=[], errors=[], parts=[()] * num_samples, answers=[None] * num_samples)


def score_weights(config: RewardConfig) -> list[float]:
    """Of the K `score_parts`."""
    of_model = [] if config.model.path is None else [config.model.weight]
    return [*(function.weight for function in config.functions), *of_model]


class Reward:
    def __init__(self, group: RoleGroup, model: RewardModel | None = None, model_weight: float = 1.0) -> None:
        self.group = group
        self.model = model
        self._model_weight = model_weight

    def score(self, batch: DataProto) -> DerivedFuture:
        """See RewardWorker.score. With a model, the scores are those of the functions plus `model_weight` times the model's, and there are
        `reward_function_scores` (B,) and what RewardModelWorker.score_conversations gives beside them; the model's are the last of
        `score_parts`."""
        needed = batch.select(["responses", "response_mask"], ["uid", "data_source", "reward_model", "extra_info"])
        functions: RemoteFuture = self.group.score(needed)
        if self.model is None:
            return DerivedFuture([functions], lambda results: results[0])
        mask = batch.tensors["response_mask"]
        return DerivedFuture([functions, self.model.score(batch)], lambda results: self._sum(results, mask))

    def _sum(self, results: list[Any], mask: torch.Tensor) -> DataProto:
        functions, model = results
        of_functions = torch.tensor(functions.non_tensor_batch["score"].tolist(), dtype=torch.float32)
        scores = of_functions + self._model_weight * model.tensors["reward_model_scores"]
        return DataProto.from_dict(
            {
                "token_level_scores": place_scores(scores, mask),
                "score_parts": torch.cat([functions.tensors["score_parts"], model.tensors["reward_model_scores"][:, None]], dim=1),
                "reward_function_scores": of_functions,
                **model.tensors,
            },
            {**functions.non_tensor_batch, "score": scores.tolist()},
            functions.meta_info,
        )
