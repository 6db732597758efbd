"""Judge worker: serves a judge's model with SGLang, and restarts the server if one of its processes ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import Device, ModelConfig, RolloutConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.restart_budget import RestartBudget
from megarl.controller.worker import Worker, register
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import opens_thinking
from megarl.machine.errors import EngineDeadError, RunError
from megarl.rewards.judge_client import JudgeEndpoint
from megarl.rollout.interface import RolloutEngineSpec

_LOOK_S = 0.5
_log = logging.getLogger(__name__)


class JudgeServerError(RunError):
    """The server of a judge did not start. The message has its last output."""

    hint = ("if it ran out of memory, use more devices per server (tensor_parallel_size of the judge)",)


@dataclass(frozen=True, kw_only=True)
class JudgeSpec:
    """A judge that the run serves.

    Attributes:
        key: Its configuration key, for messages.
        model: Its model.
        template_arguments: Arguments of its chat template, which requests send.
        rollout: Size of its engine and limit of its restarts. The other values do not apply.
        device: cpu or cuda.
    """

    key: str
    model: ModelConfig
    template_arguments: Mapping[str, Any]
    rollout: RolloutConfig
    device: Device


class JudgeWorker(Worker):
    """Process that keeps one server of a judge running. Its URL and API key stay the same.

    While the server is down its clients wait. Without restarts left it stays down, so samples have no score.
    """

    def __init__(self, spec: JudgeSpec) -> None:
        super().__init__()
        # Imported here because only runs that serve judges need them.
        from megarl.rollout.sglang.server import ServerBackend
        from megarl.rollout.sglang.server_args import START_LIMIT_S, judge_server_args

        try:
            tokenizer = load_tokenizer(spec.model.path, spec.model.trust_remote_code)
            self._opens_thinking = opens_thinking(tokenizer, arguments=spec.template_arguments)
        except ValueError as error:
            raise JudgeServerError(f"{spec.key}: {error}") from error

        engine = RolloutEngineSpec(model=spec.model, rollout=spec.rollout, device=spec.device)
        self._key = spec.key
        self._backend = ServerBackend(judge_server_args(engine), os.environ["MASTER_ADDR"], START_LIMIT_S)
        self._budget = RestartBudget(spec.rollout.restart_limit, spec.rollout.restart_window_s)
        try:
            self._backend.start()
        except EngineDeadError as error:
            raise JudgeServerError(f"{spec.key}: {error}") from error

        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="judge-server", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the server."""
        self._closed.set()
        self._watcher.join()
        self._backend.stop()

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def endpoint(self) -> JudgeEndpoint:
        """Return the server's address, after it has started."""
        return JudgeEndpoint(f"{self._backend.url}/v1", self._backend.api_key, self._opens_thinking)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def serve(self) -> None:
        """Return when the server is closed. The call fails when this process or its node is lost."""
        self._closed.wait()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if (why := self._backend.dead_process()) is not None and not self._restart(why):
                return

    def _restart(self, why: str) -> bool:
        """Restart the server as often as the budget allows. Returns whether it serves."""
        # The other processes of the server end too, so that clients with a request in progress notice.
        self._backend.stop()
        while self._budget.left:
            self._budget.spend()
            _log.warning(
                "%s: the server is restarted, restarts left: %d; %s", self._key, self._budget.left, why
            )
            try:
                self._backend.start()
            except EngineDeadError as error:
                why = str(error)
            else:
                return True

        _log.error("%s: rollout.restart_limit: %s are used up; %s", self._key, self._budget, why)
        return False
