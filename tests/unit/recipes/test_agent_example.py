"""Parts of examples/agent without its run, which tests/integration/test_agent_run.py tests."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest

from examples.agent import prepare, run
from examples.agent.reward import compute_score
from examples.agent.tools import price
from megarl.agents.episode import AnswerTurn, Episode, EpisodeLimits, WriteTurn
from megarl.agents.function_tool import FunctionTool
from megarl.agents.protocol import Task
from megarl.agents.responder import Responder
from megarl.agents.strict_calls import parse_calls
from megarl.agents.tool_environment import Toolbox, ToolEnvironment
from megarl.agents.trajectory import EpisodeEnd, Sample, Trajectory, VersionSpan
from megarl.config.load import load_config
from megarl.config.schema import DataConfig, PPOConfig, SFTConfig, SFTDataConfig
from megarl.config.validate import validate
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import TurnTemplate

FOLDER = Path(__file__).parents[3] / "examples" / "agent"


@pytest.mark.parametrize("is_busy", [False, True])
def test_what_is_fine_tuned_is_what_a_rollout_sends(tmp_path: Path, is_busy: bool) -> None:
    """An episode with the text of the correct teacher has the teacher's tokens and loss mask."""
    chance = random.Random(0)
    row = prepare.prompt_row(chance, is_busy)
    chat = prepare.conversation(row["extra_info"], "right", chance)
    prepare.save_model(tmp_path, seed=0)
    for name, of_it in (("prompts", row), ("chats", chat)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(of_it) + "\n")
    tokenizer = load_tokenizer(str(tmp_path))
    tool = FunctionTool(price)
    trained = SFTDataset(
        [str(tmp_path / "chats.jsonl")], tokenizer, SFTDataConfig(train_files=["-"], max_length=32)
    )[0]
    (prompt,) = PromptDataset(
        [str(tmp_path / "prompts.jsonl")], tokenizer, DataConfig(train_files=["-"]), [dict(tool.schema)]
    )
    template = TurnTemplate(tokenizer, [tool.schema], 16)
    template.check()
    turns = np.split(trained.response_ids, np.flatnonzero(np.diff(trained.is_trained)) + 1)[::2]
    responder = Responder(
        ToolEnvironment(Toolbox([tool])),
        template,
        parse_calls,
        Task(extra_info=row["extra_info"]),
    )

    async def play() -> Trajectory:
        await responder.start()
        episode = Episode(prompt.token_ids, 0, EpisodeLimits(max_turns=4, max_tokens=48, max_turn_tokens=8))

        for turn in turns:
            step = episode.next
            assert isinstance(step, WriteTurn)
            spans = (VersionSpan(1, len(turn)),)
            sample = Sample(turn.astype(np.int32), np.zeros(len(turn), np.float32), "stop", spans)
            episode.wrote(step.place, sample)
            step = episode.next
            assert isinstance(step, AnswerTurn)
            episode.answered(step.place, *await responder.answer(step))

        return episode.trajectory

    played = asyncio.run(play())
    assert (played.end, played.num_turns, sum(played.call_errors.values())) == (
        EpisodeEnd.done,
        2 + is_busy,
        0,
    )
    assert [*prompt.token_ids] == trained.prompt_ids
    assert played.token_ids.tolist() == trained.response_ids
    assert played.mask.tolist() == trained.is_trained
    answer = template.read(turns[-1].tolist())
    assert compute_score("price_list", answer, row["reward_model"]["ground_truth"], {}) == 1


def test_two_of_three_teachers_err() -> None:
    chance = random.Random(1)
    scores = {teacher: [] for teacher in prepare.TEACHERS}  # type: dict[str, list[bool]]

    for number in range(300):
        row = prepare.prompt_row(chance, number % 2 == 0)
        for teacher, of_it in scores.items():
            answer = prepare.conversation(row["extra_info"], teacher, chance)["messages"][-1]["content"]
            of_it.append(answer == row["reward_model"]["ground_truth"])

    shares = {teacher: sum(of_it) / len(of_it) for teacher, of_it in scores.items()}
    assert shares["right"] == 1
    assert shares["slips"] < 0.2  # one letter in eight is right by chance

    # it calls once where it is not at once that it guesses, and the tool not busy
    assert 0.15 < shares["guesses"] < 0.35


def test_the_configurations_break_no_rule(tmp_path: Path) -> None:
    prepare.save_model(tmp_path, seed=0)
    for schema, name in ((SFTConfig, "sft"), (PPOConfig, "grpo")):
        config = load_config(schema, FOLDER / f"{name}.yaml", [f"model.path={tmp_path}"])
        assert validate(config) == []
    assert (run.RECIPE.sft, run.RECIPE.train) == ("examples/agent/sft.yaml", "examples/agent/grpo.yaml")
