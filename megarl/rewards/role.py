"""The reward role: functions, judges and a reward model. A sample's score is their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from megarl.algorithms.groups import place_scores
from megarl.algorithms.masked import map_tokens, masked_row_sums
from megarl.batch.branches import BRANCH, FAILURE, ends_episode, episode_numbers, last_rows
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import RewardConfig
from megarl.controller.futures import DerivedFuture, RemoteFuture, has_ended
from megarl.controller.group import RoleGroup
from megarl.rewards.restarted_group import RestartedGroup, nothing
from megarl.rewards.reward_worker import NUM_PROMPT_END, PROMPT_ENDS, WROTE, RewardWorker

# columns of episodes
_ANSWERS = "answer_mask"
_OF_TURNS = "environment_rewards"
_ERROR_RATE = "reward/error_rate"  # in the meta information of scores
_SCORED_WAIT_S = 0.05  # for the first group; groups begun in the meantime are queued


def score_weights(config: RewardConfig) -> list[float]:
    """Return the weights of the K `score_parts`."""
    # The model's part comes last, as in the scores.
    of_model = [] if config.model.path is None else [config.model.weight]
    return [*(part.weight for part in (*config.functions, *config.judges)), *of_model]


class ConversationScorer(Protocol):
    """Interface of a reward model on ranks of its own, whose class is in a higher layer (roles)."""

    @property
    def group(self) -> RoleGroup: ...

    def score(self, batch: DataProto) -> DerivedFuture: ...


class Reward:
    """Handle to the reward worker and a reward model.

    Args:
        processes: The process of the worker, and the servers of judges that the run serves.
        with_messages: Whether judges read the prompt's messages.
    """

    def __init__(
        self,
        processes: RestartedGroup,
        model: ConversationScorer | None = None,
        model_weight: float = 1.0,
        with_messages: bool = False,
    ) -> None:
        self.processes = processes
        self.model = model
        self._model_weight = model_weight
        self._with_messages = with_messages
        self._lock = processes.lock  # the generation thread may begin groups, and the process restart
        processes.on_restart = self._begin_again
        self._begun: dict[str, DataProto] = {}  # uid -> the groups with which it was begun
        self._reported: set[str] = set()  # uids of `_begun` that `scored` has returned
        self._beginning: RemoteFuture[None] | None = None
        self._asking: RemoteFuture[dict[str, list[float]]] | None = None
        self._of_rounds: dict[str, DataProto] = {}  # uid -> result of `score_round`

    def score(self, batch: DataProto, with_texts: bool = False) -> DerivedFuture:
        """Score a batch.

        If the batch has `answer_mask`, functions receive only the text of the answer, and the turns;
        `environment_rewards` are added to the scores.

        Returns:
            `token_level_scores` as rows of tokens, and the result of RewardWorker.score. With a reward model,
            the score is that of the functions plus `model_weight` times the model's, which is the last of
            `score_parts`; the result also has `reward_function_scores` (B,) and the result of
            RewardModelWorker.score_conversations.
        """
        needed = self._needed(batch)
        scoring = self.processes.send(lambda: self.group.call(RewardWorker.score, needed, with_texts))
        return self._with_model(batch, [scoring])

    @property
    def group(self) -> RoleGroup:
        return self.processes.group

    # ---- scoring during generation

    @property
    def may_begin(self) -> bool:
        """Whether the groups begun last have arrived."""
        return self._beginning is None or has_ended(self._beginning.calls)

    def begin(self, groups: DataProto) -> None:
        """Start scoring these samples with the functions, all samples of each prompt.

        `finish` returns the scores. Raises the error of the previous call, if any.
        """
        with self._lock:
            # Raise the error of the last call here; otherwise it would be lost with the future.
            if self._beginning is not None:
                self._beginning.get()
            self._begin(self._needed(groups))

    def _begin(self, groups: DataProto) -> None:
        self._begun |= dict.fromkeys(map(str, groups.non_tensor_batch["uid"]), groups)
        # A restart begins all groups again.
        self._beginning = self.processes.send(lambda: self.group.call(RewardWorker.begin, groups), nothing)

    def _begin_again(self) -> None:
        """Begin in a new process what was begun in the lost one and is not finished."""
        rows = [
            groups.select_idxs(
                [
                    row
                    for row, uid in enumerate(groups.non_tensor_batch["uid"])
                    if self._begun.get(str(uid)) is groups
                ]
            )
            for groups in {id(groups): groups for groups in self._begun.values()}.values()
        ]
        if rows:
            self._begin(DataProto.concat(rows))

    def scored(self) -> dict[str, list[float]]:
        """Return, by uid, the functions' scores of groups that completed since the last call.

        Does not wait.
        """
        if self._asking is None:
            self._asking = self.processes.send(lambda: self.group.call(RewardWorker.scored, _SCORED_WAIT_S))
            return {}

        # Do not wait: the caller polls, and the replicas would idle in the meantime.
        if not has_ended(self._asking.calls):
            return {}
        asked = self._asking
        self._asking = None

        # A new process reports all groups, also those that the lost one has reported.
        found = asked.get()
        with self._lock:
            new = {uid: scores for uid, scores in found.items() if uid not in self._reported}
            self._reported |= new.keys() & self._begun.keys()
        return new

    @property
    def scores_rounds(self) -> bool:
        """Whether groups are scored by `score_round` instead of `begin` and `scored`.

        This is the case if a reward model takes part.
        """
        return self.model is not None

    def score_round(self, groups: DataProto) -> dict[str, list[float]]:
        """Score all samples of some prompts, wait for the result, and keep it for `finish`.

        Returns:
            The scores of each prompt by its uid, without those of samples whose scoring failed.
        """
        uids = groups.non_tensor_batch["uid"].astype(str)
        scored = self.finish(groups).get()
        del scored.meta_info[_ERROR_RATE]  # applies to this round only
        scores = {}

        for uid in dict.fromkeys(uids.tolist()):
            rows = scored.select_idxs(uids == uid)
            is_scored = rows.tensors["is_scored"].numpy()
            self._of_rounds[uid] = rows
            scores[uid] = [float(score) for score in rows.non_tensor_batch["score"][is_scored]]

        return scores

    def finish(self, batch: DataProto) -> DerivedFuture:
        """Return the result of `score` for prompts of which some may already be scored.

        These were begun, or scored by `score_round`.
        """
        # An episode of several rows is scored once.
        needed = self._needed(batch)
        uids = [str(uid) for uid in needed.non_tensor_batch["uid"]]

        if self._of_rounds.keys() >= set(uids):
            parts = [self._of_rounds.pop(uid) for uid in dict.fromkeys(uids)]
            return DerivedFuture([], lambda results: _of_all(parts))

        # Separate the prompts that are being scored from those that have not been begun.
        with self._lock:
            beginning = [] if self._beginning is None else [self._beginning]
            others = needed.select_idxs([row for row, uid in enumerate(uids) if uid not in self._begun])
            self._drop(uids)
            # A new process has begun none of them.
            finishing = self.processes.send(
                lambda: self.group.call(RewardWorker.finish, others, uids),
                lambda: self.group.call(RewardWorker.finish, needed, uids),
            )

        # Wait for the last `begin` as well, so that its error is raised.
        return self._with_model(batch, [finishing, *beginning])

    def forget(self, prompts: DataProto) -> None:
        """Drop everything begun or kept for these prompts. `finish` scores them again."""
        uids = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
        for uid in uids:
            self._of_rounds.pop(uid, None)
        with self._lock:
            self._drop(uids)
            forgetting = self.processes.send(lambda: self.group.call(RewardWorker.forget, uids), nothing)
        forgetting.get()

    # ---- internals

    def _drop(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self._begun.pop(uid, None)
        self._reported -= set(uids)

    def _needed(self, batch: DataProto) -> DataProto:
        """Return the columns that functions and judges read.

        Of an episode with several rows, this is the last one.
        """
        episodes = last_rows(batch)
        rows = episodes.ragged
        names = ["uid", "data_source", "reward_model", "extra_info"]

        # Transfer only what functions read. For an episode the response is the last turn.
        named = episodes.select([], [*names, "messages"] if self._with_messages else names)
        answers = {"responses": rows["responses"], "response_mask": rows.get(_ANSWERS, rows["response_mask"])}
        if _ANSWERS in rows:
            answers[WROTE] = rows["response_mask"]
        # The end of a prompt shows whether it opens the response's thinking.
        if "prompts" in rows:
            answers[PROMPT_ENDS] = rows["prompts"].ends(NUM_PROMPT_END)

        return DataProto.from_dict(answers, named.non_tensor_batch)

    def _with_model(self, batch: DataProto, functions: list[RemoteFuture[Any]]) -> DerivedFuture:
        """Add the reward model's scores. `functions[0]` returns the functions' scores."""
        # The reward model works concurrently with the functions.
        rows = batch.ragged
        model = [] if self.model is None else [self.model.score(batch)]

        def placed(results: list[Any]) -> DataProto:
            scores = self._sum(results[0], results[-1]) if model else results[0]
            if BRANCH in batch.non_tensor_batch:
                return _placed_on_branches(scores, batch)
            of_rows = place_scores(scores.non_tensor_batch["score"].tolist(), rows["response_mask"])

            # The environment's rewards stay on their turns; the score becomes the sum of all.
            if _OF_TURNS in rows:
                of_rows = map_tokens(torch.add, rows["response_mask"], of_rows, rows[_OF_TURNS])
                totals = masked_row_sums(of_rows, rows["response_mask"]).tolist()
                scores = DataProto.from_dict(
                    scores.columns, {**scores.non_tensor_batch, "score": totals}, scores.meta_info
                )

            return scores.union(DataProto.from_dict({"token_level_scores": of_rows}))

        return DerivedFuture([*functions, *model], placed)

    def _sum(self, functions: DataProto, model: DataProto) -> DataProto:
        of_functions = torch.tensor(functions.non_tensor_batch["score"].tolist(), dtype=torch.float32)
        scores = of_functions + self._model_weight * model.tensors["reward_model_scores"]

        return DataProto.from_dict(
            {
                "score_parts": torch.cat(
                    [functions.tensors["score_parts"], model.tensors["reward_model_scores"][:, None]], dim=1
                ),
                "is_scored": functions.tensors["is_scored"],
                "reward_function_scores": of_functions,
                **model.tensors,
            },
            {**functions.non_tensor_batch, "score": scores.tolist()},
            functions.meta_info,
        )


def _placed_on_branches(scores: DataProto, batch: DataProto) -> DataProto:
    """Return the result of `Reward.score` for the rows of a batch of agent programs.

    The score of an episode stands on the last token of its last row, and each of its rows has the values of
    the whole episode. An episode whose program failed is treated as one whose scoring failed.

    Args:
        scores: The scores of the episodes.
    """
    failed = np.array([kind is not None for kind in batch.non_tensor_batch[FAILURE]])
    of_rows = scores.select_idxs(episode_numbers(batch))
    of_functions = of_rows.non_tensor_batch["score"].astype(float) * ends_episode(batch) * ~failed

    # The row of a failed episode has no token to place a score on.
    mask = batch.ragged["response_mask"]
    placeable = RaggedTensor.of_rows(
        [
            np.ones(len(row), bool) if fails else row.numpy()
            for row, fails in zip(mask.each(), failed, strict=True)
        ],
        torch.bool,
    )
    token_scores = map_tokens(
        torch.add, placeable, place_scores(of_functions.tolist(), placeable), batch.ragged[_OF_TURNS]
    )
    totals = np.bincount(episode_numbers(batch), masked_row_sums(token_scores, placeable).numpy())

    is_scored = of_rows.tensors["is_scored"] & torch.from_numpy(~failed)
    arrays = {**of_rows.non_tensor_batch, "score": totals[episode_numbers(batch)].tolist()}
    return DataProto.from_dict(
        {**of_rows.columns, "is_scored": is_scored, "token_level_scores": token_scores},
        arrays,
        scores.meta_info,
    )


def _of_all(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate the results of `score_round` for some prompts."""
    scores = DataProto.concat(parts)
    scores.meta_info[_ERROR_RATE] = 1 - float(scores.tensors["is_scored"].double().mean())
    return scores
