"""Test that scores are not lost with the process of the reward functions, or with the server of a judge that it asks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from megarl.batch.data_proto import DataProto
from megarl.config.schema import JudgeConfig, JudgeParseConfig, RewardConfig, RewardFunctionConfig
from megarl.controller import futures
from megarl.controller.dispatch import Dispatch
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.restarts import ProcessLimitError, RestartBudget
from megarl.controller.worker import RayClassWithInitArgs, Worker, register
from megarl.rewards.judge_servers import JudgeServers, JudgeWorker
from megarl.rewards.judges import JudgeEndpoint
from megarl.rewards.restarted_group import RestartedGroup
from megarl.rewards.reward_worker import RewardWorker
from megarl.rewards.role import Reward
from tests.integration.tiny_run import save_policy
from tests.judge_server import serve_judge
from tests.unit.rewards.test_role import two_answers

pytestmark = pytest.mark.usefixtures("ray_cluster")

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)
"""


class StubJudge(JudgeWorker):
    """Serves a judge that gives every answer a score of 3, without a model. The first process does not answer 7.

    Args:
        mark: A file that the first process makes.
    """

    def __init__(self, mark: Path) -> None:
        Worker.__init__(self)
        self._closed = threading.Event()
        self._open = contextlib.ExitStack()
        self._server = self._open.enter_context(serve_judge())
        self._server.replies = {"12": '{"score": 3}', "7": '{"score": 3}'}
        if not mark.exists():
            self._server.faults = {"7": ["hang"]}
        mark.touch()

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def endpoint(self) -> JudgeEndpoint:
        return JudgeEndpoint(self._server.url)


def test_scores_survive_their_process_and_the_server_of_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_policy(tmp_path / "policy")
    (tmp_path / "judge.jinja").write_text("{{ solution }}")
    (tmp_path / "reward.py").write_text(FUNCTION)
    config = RewardConfig(
        functions=[RewardFunctionConfig(path=str(tmp_path / "reward.py"))],
        judges=[
            JudgeConfig(
                name="stub",
                path="served",
                prompt=str(tmp_path / "judge.jinja"),
                parse=JudgeParseConfig(json="score"),
                weight=2.0,
            )
        ],
        num_processes=1,
    )
    pool = RayResourcePool([2], use_gpu=False)
    of_reward, of_judge = pool.split()
    server = RayWorkerGroup(of_judge, RayClassWithInitArgs(StubJudge, tmp_path / "mark"), role="judge_stub")
    worker = RayClassWithInitArgs(RewardWorker, config, str(tmp_path / "policy"), False)
    group = RayWorkerGroup(of_reward, worker, role="reward")
    servers = JudgeServers({"stub": [server]})
    try:
        servers.connect(group)
        reward = Reward(RestartedGroup(group, RestartBudget(1), servers))
        twelve, seven = (two_answers()[[row]] for row in range(2))
        reward.begin(twelve)
        while not (first := reward.scored()):
            pass
        assert first == {"a": [2 + 2 * 3]}

        # The judge is answering. A new one answers at once, and what was begun is not reported twice.
        reward.begin(seven)
        old = server.pids
        os.kill(old[0], signal.SIGKILL)
        while not (second := reward.scored()):
            pass
        assert second == {"b": [1 + 2 * 3]}
        assert server.pids != old
        scored = reward.finish(two_answers()).get()
        assert scored.non_tensor_batch["score"].tolist() == [8, 7]

        # No restart is left. The judge serves on, so its call is not awaited.
        monkeypatch.setattr(futures, "GRACE_S", 600.0)
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(ProcessLimitError, match="1 restart within a day of this process is used up"):
            reward.score(DataProto.concat([twelve, seven])).get()
    finally:
        group.shutdown()
        server.shutdown()
        pool.release()
