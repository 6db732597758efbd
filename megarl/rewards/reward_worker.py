"""Reward worker: decodes responses and scores them with the user's functions in separate processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait

import numpy as np
import torch

from megarl.batch.data_proto import DataProto
from megarl.config.schema import RewardConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.data.tokenizer import decode_rows, decode_turns, load_tokenizer
from megarl.models.thinking import THINK
from megarl.rewards.judges import JudgeEndpoint
from megarl.rewards.process import Outcome
from megarl.rewards.scorer import BegunScore, RewardScorer, ScoreRequest, refuse_fruitless

WROTE = "model_wrote"  # column of episodes, whose `response_mask` covers only the last turn
PROMPT_ENDS = "prompt_ends"  # column with the last tokens of each prompt
_NO_SCORE = Outcome(0.0, {})  # of a run with a reward model and neither functions nor judges
NUM_PROMPT_END = 16  # enough for a tag and the line breaks after it, in tokens of one character


class RewardWorker(Worker):
    """Process that decodes responses and has the reward functions and judges score them.

    Without either it only decodes.
    """

    def __init__(self, config: RewardConfig, tokenizer_path: str, trust_remote_code: bool) -> None:
        super().__init__()
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        self._scorer = (
            RewardScorer(
                config.functions,
                config.time_limit_s,
                config.max_error_rate,
                config.num_processes,
                sandbox=config.sandbox,
                judges=config.judges,
                scored_elsewhere=config.model.path is not None,
            )
            if config.functions or config.judges
            else None
        )

        self._begun: dict[str, list[BegunScore]] = {}  # by uid
        self._unreported: set[str] = set()
        self._num_fruitless = 0  # times in a row that the pool broke before it completed a group

    def close(self) -> None:
        """End the scoring processes."""
        if self._scorer is not None:
            self._scorer.close()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def use_judges(self, endpoints: Mapping[str, Sequence[JudgeEndpoint]]) -> None:
        """Set the servers of the judges that the run serves, by the judge's name."""
        if self._scorer is not None:
            self._scorer.use_judges(endpoints)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def begin(self, groups: DataProto) -> None:
        """Start scoring samples, with all samples of a prompt together. `finish` waits for the scores."""
        if self._scorer is not None:
            for begun in self._scorer.begin(self._requests(groups)):
                self._begun.setdefault(begun.request.uid, []).append(begun)
                self._unreported.add(begun.request.uid)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def scored(self, wait_s: float) -> dict[str, list[float]]:
        """Return, by uid, the scores of groups that completed since the last call.

        Samples whose scoring failed are left out.

        Waits at most `wait_s` for the first group.

        Raises:
            RewardError: The pool broke again and again before it completed a group.
        """
        if self._scorer is None:
            return {}

        # A broken pool never completes its samples, so they are submitted again.
        lost = [uid for uid in self._unreported if any(begun.is_lost for begun in self._begun[uid])]
        if lost:
            self._num_fruitless += 1
            num_waiting = sum(len(self._begun[uid]) for uid in lost)
            refuse_fruitless(self._num_fruitless, num_waiting, "all samples of a prompt")
        for uid in lost:
            self._begun[uid] = self._scorer.begin([begun.request for begun in self._begun[uid]])

        wait(
            [begun.outcome for uid in self._unreported for begun in self._begun[uid]],
            timeout=wait_s,
            return_when=FIRST_COMPLETED,
        )

        # Report only whole groups; a later call reports the others.
        scores = {
            uid: [
                outcome.score
                for outcome in map(self._scorer.outcome, self._begun[uid])
                if outcome is not None and outcome.error is None
            ]
            for uid in sorted(self._unreported)
            if all(begun.outcome.done() for begun in self._begun[uid])
        }
        self._unreported -= scores.keys()
        if scores:
            self._num_fruitless = 0

        return scores

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def finish(self, others: DataProto, uids: Sequence[str]) -> DataProto:
        """Return the result of `score` for the samples with these uids (B,).

        Some were begun before. The others are in `others`, in order.
        """
        if self._scorer is None:  # nothing was begun
            return _table([_NO_SCORE] * len(uids))

        # Take each sample from where it was begun, in the order of the batch.
        others_in_order = iter(self._requests(others) if len(others) else [])
        samples = [begun.pop(0) if (begun := self._begun.get(uid)) else next(others_in_order) for uid in uids]

        # These groups leave the worker, whether or not `scored` has reported them.
        self.forget(uids)
        return _table(self._scorer.score(samples))

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def forget(self, uids: Sequence[str]) -> None:
        """Drop groups that were begun and will not be requested."""
        for uid in set(uids) & self._begun.keys():
            del self._begun[uid]
            self._unreported.discard(uid)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def score(self, batch: DataProto, with_texts: bool = False) -> DataProto:
        """Score a batch.

        Returns:
            `score_parts` (B, K) of the K reward functions and judges before weighting; `is_scored` (B,) bool,
            False for samples whose scoring failed; and the arrays `score` and `reward_numbers` (see Outcome).
            With `with_texts`, also the arrays `response_text`, `opens_thinking`, `answer` and `has_answer`.

        Raises:
            RewardError: The error rate is above the allowed one.
        """
        requests = self._requests(batch)
        outcomes = self._scorer.score(requests) if self._scorer else [_NO_SCORE] * len(requests)
        return _table(outcomes, requests if with_texts else None)

    def _requests(self, batch: DataProto) -> list[ScoreRequest]:
        texts = decode_rows(self._tokenizer, batch.ragged["responses"], batch.ragged["response_mask"])
        arrays = batch.non_tensor_batch
        return [
            ScoreRequest(
                str(uid), source, text, reward_model["ground_truth"], extra_info, turns, messages, is_opened
            )
            for uid, source, text, reward_model, extra_info, turns, messages, is_opened in zip(
                arrays["uid"],
                arrays["data_source"],
                texts,
                arrays["reward_model"],
                arrays["extra_info"],
                self._turns(batch),
                arrays.get("messages", [()] * len(batch)),
                self._opens_thinking(batch),
                strict=True,
            )
        ]

    def _opens_thinking(self, batch: DataProto) -> list[bool]:
        """Return whether the text before each response, or before its last turn, opens thinking."""
        if PROMPT_ENDS not in batch.ragged:
            return [False] * len(batch)
        columns = (batch.ragged[name].each() for name in (PROMPT_ENDS, "responses", "response_mask"))
        rows = zip(*columns, strict=True)
        return [self._ends_open(prompt, ids[: int(mask.int().argmax())]) for prompt, ids, mask in rows]

    def _ends_open(self, *before: torch.Tensor) -> bool:
        text = self._tokenizer.decode(torch.cat(before)[-NUM_PROMPT_END:], skip_special_tokens=False)
        return str(text).rstrip().endswith(THINK)

    def _turns(self, batch: DataProto) -> list[list[dict[str, str]] | None]:
        if WROTE not in batch.columns:
            return [None] * len(batch)
        rows = zip(batch.ragged["responses"].each(), batch.ragged[WROTE].each(), strict=True)
        return [decode_turns(self._tokenizer, np.asarray(ids), np.asarray(wrote)) for ids, wrote in rows]


def _table(outcomes: Sequence[Outcome], shown: Sequence[ScoreRequest] | None = None) -> DataProto:
    """Return the result of RewardWorker.score."""
    is_scored = [outcome.error is None for outcome in outcomes]
    arrays: dict[str, list] = {
        "score": [outcome.score for outcome in outcomes],
        "reward_numbers": [outcome.numbers for outcome in outcomes],
    }

    # Texts are returned only on request, because a training step does not read them.
    if shown is not None:
        arrays |= {
            "response_text": [request.solution_str for request in shown],
            "opens_thinking": [request.opens_thinking for request in shown],
            "answer": [outcome.answer for outcome in outcomes],
            "has_answer": [any(outcome.has_answer) for outcome in outcomes],
        }

    return DataProto.from_dict(
        tensors={
            "score_parts": torch.tensor([outcome.parts for outcome in outcomes], dtype=torch.float32),
            "is_scored": torch.tensor(is_scored, dtype=torch.bool),
        },
        non_tensors=arrays,
        meta_info={"reward/error_rate": is_scored.count(False) / len(outcomes)},
    )
