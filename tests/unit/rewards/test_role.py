"""Test the reward worker in this process: decoding, positions of scores, and reported failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch.branches import BRANCH, FAILURE
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import JudgeConfig, JudgeParseConfig, RewardConfig, RewardFunctionConfig
from megarl.controller.futures import RemoteFuture
from megarl.controller.restarts import RestartBudget
from megarl.controller.worker import RemoteMethod
from megarl.recipes.starter import number_reward
from megarl.rewards.judge_servers import JudgeServers
from megarl.rewards.restarted_group import RestartedGroup
from megarl.rewards.reward_worker import RewardWorker
from megarl.rewards.role import Reward
from megarl.rewards.scorer import BegunScore, RewardError
from tests.integration.tiny_run import SYMBOLS, save_policy
from tests.judge_server import serve_judge
from tests.unit.data.chats import character_tokenizer

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info, turns):
    assert turns[-1] == {"role": "assistant", "content": solution_str}
    said = [turn["content"] for turn in turns if turn["role"] == "environment"]
    assert said == extra_info.get("said", [])
    if solution_str == "":
        raise KeyError("nothing to score")
    return len(solution_str) + 10 * (solution_str == ground_truth) + 100 * (data_source == "two") + extra_info["bonus"]
"""
ANSWERS = ["12<end>", "3+4<end>", "<end>", "7= "]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RewardWorker]:
    save_policy(tmp_path / "policy")
    (tmp_path / "reward.py").write_text(FUNCTION)
    functions = [RewardFunctionConfig(path=str(tmp_path / "reward.py"))]
    made = RewardWorker(
        RewardConfig(functions=functions, max_error_rate=0.25, num_processes=1),
        str(tmp_path / "policy"),
        False,
    )
    yield made
    made.close()


def token_ids(text: str) -> list[int]:
    ids = [SYMBOLS.index(symbol) for symbol in text.removesuffix("<end>")]
    return [*ids, SYMBOLS.index("<end>")] if text.endswith("<end>") else ids


def of_answers(texts: list[str]) -> dict[str, RaggedTensor]:
    responses = RaggedTensor.of_rows(
        [token_ids(text) for text in texts], torch.int32, padding=SYMBOLS.index("9")
    )
    prompts = RaggedTensor.of_rows([[0]] * len(texts), torch.int32, on_left=True)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": RaggedTensor.constant(True, responses.lengths, torch.bool),
    }


def test_scores_stand_on_the_last_token_that_was_written(worker: RewardWorker) -> None:
    """12 is right (2 characters + 10); 3+4 is of the second source (3 + 100); one fails and scores 0; 7=
    scores 3 and a bonus of 0.5."""
    batch = DataProto.from_dict(
        of_answers(ANSWERS),
        {
            "uid": ["a", "a", "b", "b"],
            "data_source": ["one", "two", "one", "one"],
            "reward_model": [{"ground_truth": "12"}] * 4,
            "extra_info": [{"bonus": 0}, {"bonus": 0}, {"bonus": 0}, {"bonus": 0.5}],
        },
    )
    scored = Reward(in_this_process(worker)).score(batch, with_texts=True).get()  # type: ignore[arg-type]
    assert scored.non_tensor_batch["response_text"].tolist() == ["12", "3+4", "", "7= "]
    assert scored.non_tensor_batch["answer"].tolist() == [None] * 4  # the function returns none
    assert scored.tensors["is_scored"].tolist() == [True, True, False, True]
    assert scored.non_tensor_batch["score"].tolist() == [12, 103, 0, 3.5]
    assert scored.tensors["token_level_scores"].tolist() == [
        [0, 0, 12, 0],
        [0, 0, 0, 103],
        [0, 0, 0, 0],
        [0, 0, 3.5, 0],
    ]
    assert scored.tensors["score_parts"].tolist() == [[12], [103], [0], [3.5]]  # of the only function
    assert scored.meta_info == {"reward/error_rate": 0.25}

    reward = Reward(in_this_process(worker))  # type: ignore[arg-type]
    reward.begin(batch[:2])  # while the others are generated
    while not (early := reward.scored()):
        pass
    assert early == {"a": [12, 103]}
    reward.begin(batch[2:])
    while not (late := reward.scored()):
        pass
    assert late == {"b": [3.5]}  # the failed sample is compared with no other
    finished = reward.finish(batch[[2, 3, 0, 1]]).get()
    assert finished.non_tensor_batch["score"].tolist() == [0, 3.5, 12, 103]
    assert finished.meta_info == scored.meta_info
    assert torch.equal(finished.tensors["score_parts"], scored.tensors["score_parts"][[2, 3, 0, 1]])

    # a group that was begun counts once
    assert reward.finish(batch).get().non_tensor_batch["score"].tolist() == [12, 103, 0, 3.5]


def test_begun_groups_whose_processes_die_again_and_again_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_policy(tmp_path / "policy")
    (tmp_path / "reward.py").write_text("import time\ndef compute_score(**kwargs): time.sleep(1000)")
    functions = [RewardFunctionConfig(path=str(tmp_path / "reward.py"))]
    config = RewardConfig(functions=functions, num_processes=1, time_limit_s=900.0)
    worker = RewardWorker(config, str(tmp_path / "policy"), False)
    try:
        worker.begin(two_answers()[[0]])
        monkeypatch.setattr(BegunScore, "is_lost", True)
        assert worker.scored(wait_s=0.0) == {}
        assert worker.scored(wait_s=0.0) == {}
        with pytest.raises(
            RewardError, match="died 3 times before they scored all samples of a prompt, and left 1"
        ):
            worker.scored(wait_s=0.0)
    finally:
        worker.close()


@pytest.mark.parametrize("begun", [[], ["a"], ["b"], ["a", "b"]])
def test_the_last_row_of_an_episode_is_scored(worker: RewardWorker, begun: list[str]) -> None:
    """Whichever prompts were begun before, each episode has the score of its own last row."""
    uids = ["a", "a", "a", "b", "b", "b", "b"]
    answers = of_answers(["12<end>", "9<end>", "3+4<end>", "7= ", "9<end>", "9<end>", "3<end>"])
    no_rewards = RaggedTensor.constant(0.0, answers["responses"].lengths, torch.float32)
    batch = DataProto.from_dict(
        {**answers, "environment_rewards": no_rewards},
        {
            "uid": uids,
            BRANCH: [0, 0, 1, 0, 0, 1, 2],
            FAILURE: [None] * 7,
            "data_source": ["one"] * 7,
            "reward_model": [{"ground_truth": "12"}] * 7,
            "extra_info": [{"bonus": 0}] * 7,
        },
    )
    reward = Reward(in_this_process(worker))  # type: ignore[arg-type]
    if begun:
        reward.begin(batch.select_idxs([uid in begun for uid in uids]))
    scored = reward.finish(batch).get()
    assert scored.non_tensor_batch["score"].tolist() == [12, 3, 3, 3, 1, 1, 1]
    assert scored.tensors["token_level_scores"].sum(1).tolist() == [12, 0, 3, 3, 0, 0, 1]


class Scored(RemoteFuture):
    """Result that is available."""

    calls = ()

    def __init__(self, result: Any) -> None:
        self._result = result

    def get(self, timeout: float | None = None) -> Any:
        return self._result


class FakeModel:
    def score(self, batch: DataProto) -> Scored:
        flags = torch.tensor([False, True])
        tensors = {
            "reward_model_scores": torch.tensor([4.0, -2.0]),
            "reward_model_truncated": flags,
            "reward_model_spells_special": ~flags,
        }
        return Scored(DataProto.from_dict(tensors))


class InThisProcess:
    """Worker group with one rank, in this process."""

    def __init__(self, worker: RewardWorker) -> None:
        self._worker = worker

    def call(self, method: RemoteMethod, *arguments: Any) -> Scored:
        return Scored(getattr(self._worker, method.name)(*arguments))


def in_this_process(worker: RewardWorker) -> RestartedGroup:
    group: Any = InThisProcess(worker)
    return RestartedGroup(group, RestartBudget(0), JudgeServers({}))


def two_answers() -> DataProto:
    """Return 12, which is right (2 characters + 10), and 7, which is 1 character."""
    return DataProto.from_dict(
        of_answers(["12<end>", "7"]),
        {
            "uid": ["a", "b"],
            "data_source": ["one"] * 2,
            "reward_model": [{"ground_truth": "12"}] * 2,
            "extra_info": [{"bonus": 0}] * 2,
        },
    )


def test_of_an_episode_the_last_turn_is_scored_and_rewards_of_turns_are_added(worker: RewardWorker) -> None:
    """The function receives all turns and their authors. The first sample wrote 3+4, was told = and wrote 12,
    which is right (2 + 10); its first turn has a reward of 0.25, the other's only turn -1."""
    batch = two_answers()
    columns = of_answers(["3+4=12<end>", "7= "])
    wrote = torch.tensor([True, True, True, False, True, True, True, *[True] * 3])
    answer = torch.tensor([False] * 4 + [True] * 3 + [True] * 3)
    rewards = torch.tensor([0, 0, 0.25, 0, 0, 0, 0, 0, 0, -1])
    rows = {"response_mask": wrote, "answer_mask": answer, "environment_rewards": rewards}
    of_rows = {
        name: RaggedTensor.of_rows([values[:7].numpy(), values[7:].numpy()], values.dtype)
        for name, values in rows.items()
    }
    said = {"extra_info": [{"bonus": 0, "said": ["="]}, {"bonus": 0}]}
    made = DataProto.from_dict({**columns, **of_rows}, {**batch.non_tensor_batch, **said})
    scored = Reward(in_this_process(worker)).score(made, with_texts=True).get()  # type: ignore[arg-type]
    assert scored.non_tensor_batch["response_text"].tolist() == ["12", "7= "]
    parts = scored.tensors["score_parts"][:, 0].tolist()
    assert scored.non_tensor_batch["score"].tolist() == [parts[0] + 0.25, parts[1] - 1]
    assert scored.tensors["token_level_scores"].tolist() == [
        [0, 0, 0.25, 0, 0, 0, parts[0]],
        [0, 0, parts[1] - 1, 0, 0, 0, 0],
    ]


def test_functions_and_a_model_are_summed_with_their_weights(worker: RewardWorker) -> None:
    reward = Reward(in_this_process(worker), FakeModel(), model_weight=0.5)
    scored = reward.score(two_answers()).get()
    assert scored.non_tensor_batch["score"].tolist() == [12 + 0.5 * 4, 1 - 0.5 * 2]
    assert scored.tensors["token_level_scores"].tolist() == [[0, 0, 14], [0, 0, 0]]
    assert scored.tensors["reward_function_scores"].tolist() == [12, 1]
    assert scored.tensors["reward_model_scores"].tolist() == [4, -2]
    assert "response_text" not in scored.non_tensor_batch  # not requested
    assert scored.meta_info == {"reward/error_rate": 0}


def test_a_round_is_scored_once_by_the_model_and_its_groups_are_kept(worker: RewardWorker) -> None:
    class Counting(FakeModel):
        calls = 0

        def score(self, batch: DataProto) -> Scored:
            self.calls += 1
            return super().score(batch)

    model = Counting()
    reward = Reward(in_this_process(worker), model, model_weight=0.5)  # type: ignore[arg-type]
    assert reward.scores_rounds
    assert not Reward(in_this_process(worker)).scores_rounds  # type: ignore[arg-type]
    batch = two_answers()
    assert reward.score_round(batch) == {"a": [14], "b": [0]}
    finished = reward.finish(batch[[1, 0]]).get()
    assert finished.non_tensor_batch["score"].tolist() == [0, 14]
    assert finished.tensors["token_level_scores"].tolist() == [[0, 0, 0], [0, 0, 14]]
    assert finished.meta_info == {"reward/error_rate": 0}
    assert model.calls == 1

    # Dropped groups are scored again.
    reward.score_round(batch)
    reward.forget(batch)
    reward.finish(batch).get()
    assert model.calls == 3


def test_what_is_forgotten_is_scored_again(worker: RewardWorker) -> None:
    reward = Reward(in_this_process(worker))  # type: ignore[arg-type]
    reward.begin(two_answers())
    reward.forget(two_answers())
    other = two_answers()
    other.pop(["responses", "response_mask"])
    other = other.union(DataProto.from_dict(of_answers(["7", "12<end>"])))
    assert reward.finish(other).get().non_tensor_batch["score"].tolist() == [1, 12]


def test_a_model_alone(tmp_path: Path) -> None:
    save_policy(tmp_path / "policy")
    worker = RewardWorker(RewardConfig(), str(tmp_path / "policy"), False)
    scored = Reward(in_this_process(worker), FakeModel()).score(two_answers(), with_texts=True).get()  # type: ignore[arg-type]
    assert scored.non_tensor_batch["score"].tolist() == [4, -2]
    assert scored.non_tensor_batch["response_text"].tolist() == ["12", "7"]


def test_judges_read_the_prompt_and_their_failures_are_counted(tmp_path: Path) -> None:
    """The judge knows no reply to 7, and the model gives 12 a score of 4 with the weight 0.5."""
    save_policy(tmp_path / "policy")
    (tmp_path / "judge.jinja").write_text("{{ messages[0].content }} {{ solution }}")
    batch = two_answers().union(
        DataProto.from_dict(non_tensors={"messages": [[{"role": "user", "content": "6 x 2 ="}]] * 2})
    )

    with serve_judge() as server:
        server.replies = {"6 x 2 = 12": '{"score": 3}', "6 x 2 = 7": "{}"}
        judge = JudgeConfig(
            name="quality",
            url=server.url,
            model="m",
            prompt=str(tmp_path / "judge.jinja"),
            parse=JudgeParseConfig(json="score"),
            weight=2.0,
        )
        worker = RewardWorker(
            RewardConfig(judges=[judge], max_error_rate=0.5, num_processes=1), str(tmp_path / "policy"), False
        )
        reward = Reward(in_this_process(worker), FakeModel(), 0.5, with_messages=True)  # type: ignore[arg-type]
        scored = reward.score(batch).get()
        reward.begin(batch)
        while not (early := reward.scored()):
            pass
        worker.close()

    assert scored.non_tensor_batch["score"].tolist() == [2 * 3 + 0.5 * 4, 0.5 * -2]
    assert scored.tensors["is_scored"].tolist() == [True, False]
    assert scored.tensors["score_parts"].tolist() == [[3, 4], [0, -2]]
    assert [numbers["judge/quality/failed"] for numbers in scored.non_tensor_batch["reward_numbers"]] == [
        0,
        1,
    ]
    assert scored.meta_info == {"reward/error_rate": 0.5}
    assert early.items() <= {"a": [6.0], "b": []}.items()


@pytest.mark.parametrize("num_breaks", [0, 1, 3])
def test_each_prompt_says_whether_it_opens_the_thinking(tmp_path: Path, num_breaks: int) -> None:
    """A template opens the thinking of one prompt, opens and closes that of the next, and writes no tag before
    the third; of an episode, the text before its last turn counts."""
    tokenizer = character_tokenizer(vocabulary_extra="<>/")
    tokenizer.save_pretrained(tmp_path / "policy")
    starter = Path(number_reward.__file__)
    worker = RewardWorker(
        RewardConfig(functions=[RewardFunctionConfig(path=str(starter))], num_processes=1),
        str(tmp_path / "policy"),
        False,
    )
    opened = "<think>" + "\n" * num_breaks
    prompts = ["a" * 30 + opened, f"{opened}</think>\n", "ab", "ab", opened]
    responses = ["4</think>5"] * 3 + [f"7</think>8{opened}4</think>5", "4</think>5 b 4</think>5"]
    turns = [0, 0, 0, len(f"7</think>8{opened}"), len("4</think>5 b ")]  # start of the last one
    rows = {
        "prompts": [tokenizer.encode(text) for text in prompts],
        "responses": [tokenizer.encode(text) for text in responses],
        "answer_mask": [
            [place >= start for place in range(len(text))]
            for text, start in zip(responses, turns, strict=True)
        ],
        "response_mask": [[True] * len(text) for text in responses],
    }
    dtypes = {"answer_mask": torch.bool, "response_mask": torch.bool}
    batch = DataProto.from_dict(
        {name: RaggedTensor.of_rows(values, dtypes.get(name, torch.int32)) for name, values in rows.items()}
        | {
            "environment_rewards": RaggedTensor.constant(
                0.0, torch.tensor([len(text) for text in responses]), torch.float32
            )
        },
        {
            "uid": list("abcde"),
            "data_source": ["one"] * 5,
            "reward_model": [{"ground_truth": "5"}] * 5,
            "extra_info": [{}] * 5,
        },
    )
    scored = Reward(in_this_process(worker)).score(batch, with_texts=True).get()  # type: ignore[arg-type]
    worker.close()
    assert scored.non_tensor_batch["response_text"].tolist() == ["4</think>5"] * 5
    assert scored.non_tensor_batch["opens_thinking"].tolist() == [True, False, False, True, False]
    assert scored.non_tensor_batch["score"].tolist() == [1.0] * 5
