"""The reward role: one worker that decodes responses and scores them with the user's functions, in processes of its own."""

from __future__ import annotations

from megarl.algorithms.scores import place_scores
from megarl.config.schema import RewardConfig
from megarl.controller.dispatch import Dispatch, register
from megarl.controller.futures import DerivedFuture
from megarl.controller.group import RoleGroup
from megarl.controller.worker import Worker
from megarl.data.tokenizer import load_tokenizer
from megarl.protocol.batch import DataProto
from megarl.rewards.scorer import RewardScorer, ScoreRequest


class RewardWorker(Worker):
    def __init__(self, config: RewardConfig, tokenizer_path: str, trust_remote_code: bool) -> None:
        super().__init__()
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        self._scorer = RewardScorer(config.functions, config.time_limit_s, config.max_error_rate, config.num_processes)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def score(self, batch: DataProto) -> DataProto:
        """`token_level_scores` (B, R), and the arrays `response_text`, `score`. Raises RewardError above the allowed error rate."""
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
        report = self._scorer.score(requests)
        return DataProto.from_dict(
            tensors={"token_level_scores": place_scores(report.scores, mask)},
            non_tensors={"response_text": texts, "score": list(report.scores)},
            meta_info={"reward/error_rate": len(report.errors) / len(requests)},
        )


class Reward:
    def __init__(self, group: RoleGroup) -> None:
        self.group = group

    def score(self, batch: DataProto) -> DerivedFuture:
        """See RewardWorker.score."""
        needed = batch.select(["responses", "response_mask"], ["uid", "data_source", "reward_model", "extra_info"])
        return DerivedFuture([self.group.score(needed)], lambda results: results[0])
