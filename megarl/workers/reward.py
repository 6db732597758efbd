"""The reward worker: it decodes responses and has the user's functions score them, in processes of their own."""

from __future__ import annotations

import torch

from megarl.batch.data_proto import DataProto
from megarl.config.schema import RewardConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.data.tokenizer import decode_rows, load_tokenizer
from megarl.rewards.scorer import RewardScorer, ScoreReport, ScoreRequest


class RewardWorker(Worker):
    """One process that decodes responses and has them scored by the functions. Without functions it only decodes."""

    def __init__(self, config: RewardConfig, tokenizer_path: str, trust_remote_code: bool) -> None:
        super().__init__()
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        self._scorer = (
            RewardScorer(config.functions, config.time_limit_s, config.max_error_rate, config.num_processes) if config.functions else None
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def score(self, batch: DataProto, with_texts: bool = False) -> DataProto:
        """`score_parts` (B, K) of the K reward functions before their weights, and the array `score`; with texts also the arrays
        `response_text` and `answer` (what a function took for it, else the whole text).

        Raises RewardError above the allowed error rate.
        """
        texts = decode_rows(self._tokenizer, batch.ragged["responses"], batch.ragged["response_mask"])
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
        arrays_of_texts = {
            "response_text": texts,
            "answer": [text if answer is None else answer for text, answer in zip(texts, report.answers, strict=True)],
        }
        return DataProto.from_dict(
            tensors={"score_parts": torch.tensor(report.parts, dtype=torch.float32)},
            non_tensors={"score": list(report.scores), **(arrays_of_texts if with_texts else {})},
            meta_info={"reward/error_rate": len(report.errors) / len(requests)},
        )


def _no_scores(num_samples: int) -> ScoreReport:
    return ScoreReport(scores=[0.0] * num_samples, metrics=[], errors=[], parts=[()] * num_samples, answers=[None] * num_samples)
