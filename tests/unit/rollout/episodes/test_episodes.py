"""Test episodes as rows of a batch: the author of each token, and that tool results change nothing that is
trained or reported."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.agents.episode import AnswerTurn, Episode, EpisodeLimits, WriteTurn
from megarl.agents.function_tool import FunctionTool
from megarl.agents.protocol import CallError, CallErrorKind, Reply, Task
from megarl.agents.responder import Responder
from megarl.agents.strict_calls import parse_calls
from megarl.agents.tool_environment import Toolbox, ToolEnvironment
from megarl.agents.trajectory import Sample, Trajectory, VersionSpan
from megarl.algorithms.groups import place_scores
from megarl.algorithms.losses import ActorLoss, CriticLoss, MiniBatchCounts
from megarl.algorithms.metrics import age_metrics, agent_metrics, data_metrics
from megarl.batch.branches import merge_branches
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AgentConfig,
    AlgorithmConfig,
    CorrectionLevel,
    EnvironmentConfig,
    HarnessConfig,
    KLConfig,
    KLWhere,
    OverlongConfig,
    RolloutCorrectionConfig,
    SamplingConfig,
)
from megarl.controller.errors import PhaseTimeoutError
from megarl.controller.worker import RayClassWithInitArgs
from megarl.data.tokenizer import render_chat
from megarl.data.turns import TurnTemplate
from megarl.machine.errors import RunError
from megarl.rollout.driver.replicas import unshared
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.sample_rows import sample_rows, with_prompts
from megarl.rollout.driver.scheduler import Deliver, RequestScheduler
from megarl.rollout.episodes.environments import Environments
from megarl.rollout.episodes.episode_runner import SessionRunner, TurnRunner
from megarl.rollout.interface import GenerationRequest
from megarl.rollout.worker.environment import EnvironmentServer, EnvironmentWorker, TurnReport
from megarl.trainers.advantages import AdvantageStep, correct_rollout
from tests.fake_engine import plain_sample
from tests.unit.data.chats import TEMPLATE, character_tokenizer
from tests.unit.data.test_turns import FAMILIES, tokenizer_of

PROMPT = [5, 6]


def played(*turns: tuple[list[int], list[int]], reward: float = 0.0, error: bool = False) -> Trajectory:
    """Build a trajectory. Each turn consists of the model's tokens and the result, which is empty for the
    last."""
    episode = Episode(PROMPT, 3, EpisodeLimits(max_turns=9, max_tokens=99))
    for written, told in turns:
        step = episode.next
        assert isinstance(step, WriteTurn)
        ids = np.array(written, dtype=np.int32)
        spans = (VersionSpan(4, len(ids)),)
        episode.wrote(step.place, Sample(ids, -ids.astype(np.float32) / 100, "stop", spans))
        step = episode.next
        assert isinstance(step, AnswerTurn)
        errors = [CallError(CallErrorKind.timed_out, "slow")] if error else []
        episode.answered(
            step.place,
            told,
            Reply((), reward, not told, int(bool(told)), errors if told else [], 0.5 * bool(told)),
        )

    return episode.trajectory


ROWS = [
    played(([10, 11], [90, 91, 92]), ([12], [])),
    played(([13, 14], [])),
    played(([15], [93]), ([16], [94]), ([17], []), reward=0.5, error=True),
]


def batch() -> DataProto:
    prompts = DataProto.from_dict(
        {"prompts": RaggedTensor.of_rows([PROMPT] * 3, torch.int32, on_left=True)},
        {"uid": ["a", "a", "b"]},
        {"some": "thing"},
    )
    return with_prompts(prompts, sample_rows(ROWS), 4, pad_token_id=0)


def test_rows_of_a_batch() -> None:
    made = batch()
    assert made.tensors["responses"].tolist() == [
        [10, 11, 90, 91, 92, 12],
        [13, 14, 0, 0, 0, 0],
        [15, 93, 16, 94, 17, 0],
    ]
    yes = True
    no = False
    assert made.tensors["response_mask"].tolist() == [
        [yes, yes, no, no, no, yes],
        [yes, yes, no, no, no, no],
        [yes, no, yes, no, yes, no],
    ]
    assert made.tensors["answer_mask"].tolist() == [
        [no] * 5 + [yes],
        [yes, yes, no, no, no, no],
        [no, no, no, no, yes, no],
    ]
    assert made.tensors["environment_rewards"].tolist() == [[0] * 6, [0] * 6, [0.5, 0, 0.5, 0, 0.5, 0]]
    assert made.tensors["token_versions"].tolist() == [
        [4, 4, -1, -1, -1, 4],
        [4, 4, -1, -1, -1, -1],
        [4, -1, 4, -1, 4, -1],
    ]
    arrays = {
        key: made.non_tensor_batch[key].tolist()
        for key in ("num_turns", "num_calls", "episode_end", "finish_reason", "call_errors")
    }
    assert arrays == {
        "num_turns": [2, 1, 3],
        "num_calls": [1, 0, 2],
        "episode_end": ["done"] * 3,
        "finish_reason": ["stop"] * 3,
        "call_errors": [{}, {}, {"timed out": 2}],
    }
    assert agent_metrics(made.non_tensor_batch) == {
        "agent/turns/mean": 2,
        "agent/turns/max": 3,
        "agent/turns/min": 1,
        "agent/calls/mean": 1,
        "agent/tool_s/mean": 0.5,
        "agent/errors/timed_out": pytest.approx(2 / 3),
        "agent/ended/done": 1,
    }


def scored(poison: float) -> DataProto:
    """Return a scored batch with `poison` at every token of a tool, in log-probs, values and scores."""
    made = batch()
    mask = made.ragged["response_mask"]
    generator = torch.Generator().manual_seed(0)

    def column(key: str) -> RaggedTensor:
        values = (
            torch.rand(mask.num_tokens, generator=generator) if key != "token_level_scores" else scores.flat()
        )
        return replace(mask, values=torch.where(mask.flat(), values, poison), padding=0)

    scores = place_scores([1.0, 0.0, 1.0], mask)
    assert isinstance(scores, RaggedTensor)
    keys = ("token_level_scores", "old_log_probs", "ref_log_prob", "values", "rollout_log_probs")
    columns = {key: column(key) for key in keys}

    return made.select([key for key in made.columns if key not in columns]).union(
        DataProto.from_dict(columns)
    )


def by_hand(outputs: dict[str, torch.Tensor], rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the actor's and the critic's loss in float64, row by row, from only the 8 tokens that the model
    wrote."""
    losses = []
    for row, mask in enumerate(rows["response_mask"]):
        log_probs, entropy, values = (
            outputs[name][row][mask].double() for name in ("log_probs", "entropy", "values")
        )
        old, advantages, weights, before, returns = (
            rows[name][row][mask].double()
            for name in ("old_log_probs", "advantages", "rollout_weights", "values", "returns")
        )
        ratio = (log_probs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        bounded = before + (values - before).clamp(-0.2, 0.2)
        errors = torch.maximum((values - returns) ** 2, (bounded - returns) ** 2) / 2
        losses.append((errors - weights * gain - 0.01 * entropy).sum())

    return torch.stack(losses).sum() / 8


@pytest.mark.parametrize("estimator", [AdvantageEstimator.gae, AdvantageEstimator.grpo])
def test_what_tools_wrote_reaches_no_metric_no_advantage_and_no_gradient(
    estimator: AdvantageEstimator,
) -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=estimator),
        kl=KLConfig(where=KLWhere.reward),
        rollout_correction=RolloutCorrectionConfig(level=CorrectionLevel.token),
        entropy_coefficient=0.01,
        overlong=OverlongConfig(buffer_share=0.5),
    )
    found = []

    for poison in (0.0, math.nan):
        rows, of_correction = correct_rollout(scored(poison), algorithm.rollout_correction)
        rows, of_advantages = AdvantageStep(algorithm, max_response_length=4)(rows)
        metrics = of_correction | of_advantages | data_metrics(rows.columns, 3) | age_metrics(rows.columns, 4)
        padded = {name: column.clone() for name, column in rows.tensors.items()}
        mask = padded["response_mask"]
        outputs = {
            name: torch.where(
                mask, torch.linspace(-2, 0, mask.numel()).view(mask.shape), poison
            ).requires_grad_()
            for name in ("log_probs", "entropy", "values")
        }
        counts = MiniBatchCounts.of(mask)
        shares = [
            ActorLoss(algorithm=algorithm, counts=counts)(outputs, padded),
            CriticLoss(value_loss=algorithm.value_loss, counts=counts)(outputs, padded),
        ]
        loss = shares[0].loss + shares[1].loss
        gradients = torch.autograd.grad(loss, list(outputs.values()))
        reference = by_hand(outputs, padded)
        for gradient, expected in zip(
            gradients, torch.autograd.grad(reference, list(outputs.values())), strict=True
        ):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
            assert not gradient[~mask].any()
            assert gradient[mask].any()
        assert loss.item() == pytest.approx(reference.item(), abs=1e-6)
        metrics |= {name: metric.value for share in shares for name, metric in share.metrics.items()}
        assert all(map(math.isfinite, metrics.values()))
        found.append((metrics, loss.item(), [gradient.tolist() for gradient in gradients]))

    assert found[0] == found[1]

    # Rows have 6, 2 and 5 tokens, of which the model wrote 3, 2 and 3: limits of 3, and of 4 with a penalty
    # from 2, count those.
    assert (metrics["response_length/max"], metrics["response_length/mean"]) == (3, pytest.approx(8 / 3))
    assert metrics["response_length/clip_ratio"] == pytest.approx(2 / 3)
    assert (metrics["reward/overlong_penalty"], metrics["reward/overlong_fraction"]) == (
        pytest.approx(-1 / 3),
        pytest.approx(2 / 3),
    )


# ---- from sampled tokens to model inputs


def price(item: str) -> str:
    return {"ab": "42"}[item]


async def hang() -> str:
    await asyncio.sleep(600)
    return ""


FAILING = [  # each with the kind under which it is counted
    ("raised", '{"name": "price", "arguments": {"item": "zz"}}', "price raised KeyError: 'zz'"),
    ("timed_out", '{"name": "hang"}', "hang took longer than 0.5 s"),
    ("refused_arguments", '{"name": "price", "arguments": 3}', "arguments must be an object, not 3"),
    ("unknown_tool", '{"name": "cost"}', "there is no tool 'cost'; there are: price, hang"),
    ("unreadable", "{price}", "the call could not be read: it is not JSON"),
    (
        "too_many_calls",
        '{"name": "price", "arguments": {"item": "ab"}}',
        "a turn may have 5 calls; this is number 6 and was not run",
    ),
]


@pytest.mark.parametrize("forgets_case", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_failure_is_a_line_a_counter_and_a_trained_sample_and_what_is_sent_grows_at_its_end(
    family: str, forgets_case: bool
) -> None:
    """Holds for each family's template, and if decoded and re-encoded text has other tokens."""
    tokenizer = tokenizer_of(*FAMILIES[family], forgets_case=forgets_case)
    toolbox = Toolbox([FunctionTool(price), FunctionTool(hang)])
    template = TurnTemplate(tokenizer, toolbox.schemas)
    environment = ToolEnvironment(toolbox, max_parallel=5, time_limit_s=0.5)
    prompt = render_chat(
        tokenizer, [{"role": "user", "content": "?"}], for_generation=True, tools=toolbox.schemas
    )
    episode = Episode(prompt, 3, EpisodeLimits(max_turns=3, max_tokens=2000))
    turns = [
        "<think>AB</think>" + "".join(f"<tool_call>{call}</tool_call>" for _, call, _ in FAILING),
        "It is 42",
    ]
    drawn = [[*map(tokenizer.convert_tokens_to_ids, turn), tokenizer.eos_token_id] for turn in turns]
    sent: list[list[int]] = []

    async def play() -> list[int]:
        responder = Responder(environment, template, parse_calls, Task())
        bridge = list[int]()
        await responder.start()

        while (step := episode.next) is not None:
            if isinstance(step, WriteTurn):
                sent.append(step.token_ids)
                ids = np.array(drawn[len(sent) - 1], dtype=np.int32)
                spans = (VersionSpan(4, len(ids)),)
                episode.wrote(step.place, Sample(ids, -np.ones(len(ids), np.float32), "stop", spans))
            else:
                token_ids, reply = await responder.answer(step)
                bridge += token_ids
                episode.answered(step.place, token_ids, reply)

        await responder.close()
        return bridge

    bridge = asyncio.run(play())
    assert sent == [prompt, [*prompt, *drawn[0], *bridge]]
    said = tokenizer.decode(bridge)

    for _, _, line in FAILING:
        line = json.dumps(line)[1:-1] if family == "llama" else line  # if results are JSON
        assert (line.lower() if forgets_case else line) in said

    prompts = DataProto.from_dict(
        {"prompts": RaggedTensor.of_rows([prompt], torch.int32, on_left=True)}, {"uid": ["a"]}, {}
    )
    row = with_prompts(prompts, sample_rows([episode.trajectory]), 4, pad_token_id=0)
    assert row.tensors["responses"][0].tolist() == [*drawn[0], *bridge, *drawn[1]]
    assert row.tensors["response_mask"][0].tolist() == [True] * len(drawn[0]) + [False] * len(bridge) + [
        True
    ] * len(drawn[1])
    metrics = agent_metrics(row.non_tensor_batch)
    assert {name: share for name, share in metrics.items() if "errors" in name} == {
        f"agent/errors/{kind}": pytest.approx(1 / 6) for kind, _, _ in FAILING
    }


# ---- concurrent engines and environments

ENVIRONMENT = """
import asyncio
from megarl.agents.protocol import Reply
class Game:
    async def start(self, task):
        self.index = task.extra_info["index"]
        self.note("opened")
    def note(self, what):
        with open({file!r}, "a") as file:
            file.write(f"{{self.index}} {{what}}\\n")
    async def respond(self, turn):
        await asyncio.sleep(600 if self.index % 50 == 7 else self.index % 5 / 1000)
        if self.index == {fails}:
            raise LookupError("no such game")
        return Reply(messages=[{{"role": "user", "content": "go on"}}], reward=1.0, is_done=turn.number == self.index % 4)
    async def close(self):
        self.note("closed")
"""


class Nobody(list[None]):
    """Stub for replicas."""

    exclusive = staticmethod(unshared)


class Writing(RequestScheduler):
    """Stub for the request scheduler: a turn is two tokens, immediately."""

    def __init__(self, end_token_id: int) -> None:
        super().__init__(
            Nobody([None]),  # type: ignore[arg-type]
            lambda replica: True,
            max_concurrency=2,
            answer_limit_s=60,
            sample_limit_s=200,
        )
        self._end = end_token_id
        self._waiting = list[tuple[GenerationRequest, Deliver[Sample]]]()
        self.seen: list[GenerationRequest] = []
        self.orders: list[AnswerTurn] = []  # that were sent to environment processes

    is_at_work = property(lambda self: bool(self._waiting))

    def begin(
        self,
        requests: Sequence[GenerationRequest],
        delivers: Sequence[Deliver[Sample]],
        **how: Any,
    ) -> list[int]:
        self._waiting += zip(requests, delivers, strict=True)
        self.seen += requests
        return [len(self.seen)]

    def poll(self, wait_s: float) -> None:
        waiting = self._waiting
        self._waiting = []
        for _, deliver in waiting:
            deliver(0, plain_sample([7, self._end], [-1.0, -2.0], "stop", 3))

    def cancel(self, numbers: Collection[int]) -> None: ...


class Process:
    """Stub for the group of an environment process, which runs in a thread."""

    def __init__(self, make: RayClassWithInitArgs, dies_at: int, sent: list[Any]) -> None:
        self._sent = sent
        self._thread = ThreadPoolExecutor(1)
        self._worker = make.cls(*make.args)
        server = self._worker._server
        if isinstance(server, EnvironmentServer):
            server._limit_s = 4.0  # long compared with other calls, even on a busy machine
        self._calls_left = dies_at

    def call(self, method: Any, *arguments: Any) -> Future[Any]:
        self._calls_left -= 1
        self._sent += arguments[0]
        future = self._thread.submit(
            self._die if self._calls_left == 0 else method.function, self._worker, *arguments
        )
        future.get = future.result  # type: ignore[attr-defined]
        return future

    def call_beside(self, method: Any) -> None:
        method.function(self._worker)

    def _die(self, *arguments: Any) -> None:
        raise PhaseTimeoutError("environment", "exchange", 1.0, [])

    def drain_spans(self) -> list[Any]:
        return []

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False)


def episode_rollout(
    folder: Path,
    fails: int = -1,
    deaths: Sequence[int] = (),
    max_turns: int = 3,
    agent: AgentConfig | None = None,
) -> tuple[Rollout, Writing]:
    """Build the rollout.

    Args:
        deaths: The calls in which the first process of two dies, then its replacement, and so on.
    """
    left = list(deaths)
    tokenizer = character_tokenizer(TEMPLATE)
    folder.mkdir(exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "game.py").write_text(ENVIRONMENT.format(file=str(folder / "notes"), fails=fails))
    agent = agent or AgentConfig(
        environment=EnvironmentConfig(path=f"{folder / 'game.py'}:Game"), max_concurrency=32
    )

    writing = Writing(tokenizer.eos_token_id)

    class Threads(Environments):
        def _start(self, number: int) -> Any:
            return Process(self._worker, left.pop(0) if left and number == 0 else 0, writing.orders)

    def some(futures: Sequence[Any], wait_s: float) -> list[Any]:
        return list(wait(futures, wait_s, return_when=FIRST_COMPLETED).done)

    worker = RayClassWithInitArgs(EnvironmentWorker, agent, str(folder), False, None, 200)
    limits = {"restart_limit": 5, "hang_limit_s": 60.0, "phase_time_limit_s": 60.0}
    pool = SimpleNamespace(lost_nodes=dict, move_from_lost_nodes=dict)
    environments = Threads([pool, pool], worker, **limits, wait=some)  # type: ignore[list-item, arg-type]
    weights = SimpleNamespace(
        readmit=lambda replica: True, can_readmit=lambda: True, bring_in=lambda: None, version=3
    )
    rules = TokenRules(pad_token_id=0, stop_token_ids=(tokenizer.eos_token_id,), max_response_length=200)
    of_episodes = EpisodeLimits(max_turns=max_turns, max_tokens=200)
    runner = SessionRunner if agent.harness.is_used else TurnRunner
    episodes = runner(writing, environments, of_episodes)

    made = Rollout(episodes.scheduler, weights, rules, seed=0, episodes=episodes)  # type: ignore[arg-type]
    return made, writing


PROGRAM = """
import httpx
def run(task, endpoint):
    with open({file!r}, "a") as file:
        file.write(f"{{task.extra_info['index']}}\\n")
    headers = {{"Authorization": "Bearer " + endpoint.api_key}}
    for text in ("hi", "and then") if task.extra_info["index"] % 2 else ("hi",):
        body = {{"model": "m", "messages": [{{"role": "user", "content": text}}]}}
        httpx.post(endpoint.base_url + "/chat/completions", json=body, headers=headers).raise_for_status()
    if task.extra_info["index"] == 4:
        raise LookupError("no such shop")
    return task.extra_info["index"]
"""


def test_programs_of_a_process_that_dies_start_again(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(file=str(notes)))
    harness = HarnessConfig(function=f"{program}:run", time_limit_s=40)
    rollout, _ = episode_rollout(tmp_path, deaths=[2], agent=AgentConfig(harness=harness))
    made = rollout.generate(prompts(8), SamplingConfig(n=1), step=1)

    # Odd episodes have two conversations, and one fails.
    arrays = made.non_tensor_batch
    assert arrays["uid"].tolist() == ["0", "1", "1", "2", "3", "3", "4", "5", "5", "6", "7", "7"]
    assert arrays["branch"].tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert arrays["failure"].tolist() == [None] * 6 + ["raised"] + [None] * 5
    assert arrays["num_turns"].tolist() == [1, 2, 2, 1, 2, 2, 0, 2, 2, 1, 2, 2]
    rewards = [row.tolist() for row in made.ragged["environment_rewards"].each()]
    assert rewards == [
        [0, 0], [0, 0], [0, 1], [0, 2], [0, 0], [0, 3], [0], [0, 0], [0, 5], [0, 6], [0, 0], [0, 7],
    ]  # fmt: skip
    assert len({tuple(row.tolist()) for row in made.ragged["prompts"].each()}) == 3
    assert rollout.episodes.environments.num_restarts == 1
    assert set(notes.read_text().split()) == set("01234567")
    metrics = agent_metrics(merge_branches(made).non_tensor_batch)
    assert (metrics["agent/branches/mean"], metrics["agent/failures/raised"]) == (1.5, 1 / 8)


def prompts(count: int, notes: str = "") -> DataProto:
    arrays = {
        "uid": [str(index) for index in range(count)],
        "messages": [[]] * count,
        "reward_model": [{}] * count,
    }
    ids = RaggedTensor.of_rows([PROMPT] * count, torch.int32, on_left=True)
    return DataProto.from_dict(
        {"prompts": ids},
        {**arrays, "extra_info": [{"index": index, "notes": notes} for index in range(count)]},
    )


def test_of_many_episodes_at_once_each_has_its_own_environment_and_hangs_cost_nobody_else(
    tmp_path: Path,
) -> None:
    rollout, writing = episode_rollout(tmp_path)
    made = rollout.generate(prompts(100), SamplingConfig(n=2), step=1)
    ends = made.non_tensor_batch["episode_end"].tolist()
    turns = made.non_tensor_batch["num_turns"].tolist()

    for row, (end, num_turns) in enumerate(zip(ends, turns, strict=True)):
        index = row // 2
        if index % 50 == 7:
            assert (end, num_turns) == ("time", 1)
        else:  # a fourth turn would exceed the limit
            assert (end, num_turns) == ("turns" if index % 4 == 3 else "done", min(index % 4 + 1, 3))

    assert made.ragged["environment_rewards"].flat().sum() == sum(turns) - ends.count("time")
    notes = Counter((tmp_path / "notes").read_text().splitlines())
    assert set(notes.values()) == {2}  # both samples of a prompt, each opened once and closed once
    assert len(notes) == 200

    # The ids of each turn are those of the turn before, the sampled tokens, and the bridge.
    sent = sorted((request.prompt for request in writing.seen if request.uid == "2"), key=len)
    assert [sent[2][: len(sent[0])], sent[4][: len(sent[2])]] == [sent[0], sent[2]]
    assert sent[2][len(sent[0]) :][:1] == [7]
    assert len({request.sampling.seed for request in writing.seen}) == len(writing.seen)


def test_what_an_environment_raises_ends_the_generation_and_says_where(tmp_path: Path) -> None:
    rollout, _ = episode_rollout(tmp_path, fails=2)
    with pytest.raises(Exception, match=r"Game\.respond, in turn 1: LookupError: no such game"):
        rollout.generate(prompts(4), SamplingConfig(n=1), step=1)


def test_episodes_of_a_process_that_is_lost_begin_again_with_their_seeds(tmp_path: Path) -> None:
    (whole, lossy) = (tmp_path / name for name in ("whole", "lossy"))
    undisturbed, _ = episode_rollout(whole)
    rollout, writing = episode_rollout(lossy, deaths=[2])
    rows = [each.generate(prompts(7), SamplingConfig(n=1), step=1) for each in (undisturbed, rollout)]
    assert rollout.episodes.environments.num_restarts == 1
    for key in ("responses", "response_mask", "environment_rewards"):
        assert rows[0].tensors[key].tolist() == rows[1].tensors[key].tolist()
    first = Counter(request.sampling.seed for request in writing.seen if len(request.prompt) == len(PROMPT))
    assert set(first.values()) == {1, 2}
    given_up, _ = episode_rollout(lossy, deaths=[1, 1])
    with pytest.raises(RunError, match="the environment was lost 2 times, in turn 1"):
        given_up.generate(prompts(7), SamplingConfig(n=1), step=1)


@pytest.mark.parametrize("deaths", [[], [3]])
def test_a_task_is_sent_once_to_each_process_of_its_episode(tmp_path: Path, deaths: list[int]) -> None:
    later = list[list[int]]()
    for size in (0, 1_000_000):
        rollout, writing = episode_rollout(tmp_path / str(size), deaths=deaths)
        made = rollout.generate(prompts(4, "n" * size), SamplingConfig(n=2), step=1)
        assert rollout.episodes.environments.num_restarts == len(deaths)
        assert made.non_tensor_batch["num_turns"].tolist() == [1, 1, 2, 2, 3, 3, 3, 3]
        # The first turn of each attempt has the task, and no other turn has it.
        assert {order.place[1] == 0 for order in writing.orders if order.task} == {True}
        assert all(order.task for order in writing.orders if order.place[1] == 0)
        later.append(sorted(len(pickle.dumps(order)) for order in writing.orders if not order.task))
        tasks = [len(pickle.dumps(order)) for order in writing.orders if order.task]
        assert min(tasks) > size
        assert len(tasks) == 8 if not deaths else len(tasks) > 8
    if not deaths:  # a process dies among its calls, after any number of turns
        assert later[0] == later[1]
        assert len(later[0]) == 10
    assert max(later[1]) < 1000


def test_an_episode_that_ends_while_its_turn_waits_gets_no_environment() -> None:
    made = list[str]()

    class ReplyOfUser(Reply):
        """A class that the driver cannot import."""

    class Slow:
        def __init__(self, name: str) -> None:
            self._name = name
            made.append(name)

        async def start(self) -> None: ...

        async def answer(self, turn: AnswerTurn) -> tuple[list[int], Reply]:
            await asyncio.sleep(0.05)
            return [1], ReplyOfUser([{"role": "user", "content": "on"}], reward=0.5)

        async def close(self) -> None: ...

    async def play() -> list[TurnReport]:
        server = EnvironmentServer(lambda task: Slow(task.extra_info["name"]), 30.0, 1)  # type: ignore[arg-type, return-value]
        first, second = (AnswerTurn((0, turn), [1], is_last=False) for turn in (0, 1))

        def task(name: str) -> Task:
            return Task(extra_info={"name": name})

        await server.answer(first._replace(episode=2, task=task("c")))
        orders = [
            first._replace(episode=0, task=task("a")),
            first._replace(episode=1, task=task("b")),
            second._replace(episode=2),
        ]
        answers = [asyncio.ensure_future(server.answer(order)) for order in orders]
        await asyncio.sleep(0)  # the first has the slot, and the others wait
        await asyncio.gather(server.close(1), server.close(2))
        reports = await asyncio.gather(*answers)
        assert server.num_open == 1
        return reports

    reports = asyncio.run(play())
    assert made == ["c", "a"]
    assert [report.reply for report in reports] == [Reply(reward=0.5), None, None]
    assert type(reports[0].reply) is Reply  # without the messages, whose tokens are in the report
    assert [report.token_ids for report in reports] == [[1], (), ()]


def test_of_one_turn_the_requests_are_those_without_an_environment(tmp_path: Path) -> None:
    rollout, writing = episode_rollout(tmp_path, max_turns=1)
    made = rollout.generate(prompts(3), SamplingConfig(n=2), step=4)
    planned = rollout.requests(prompts(3), SamplingConfig(n=2), 4)
    assert writing.seen == [request._replace(task=None) for request in planned]
    assert made.tensors["response_mask"].all()
