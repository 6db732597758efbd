"""Entry points of SGLang's spawned processes: SGLang's own entry points, after preparing the process."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import traceback
from typing import Any

import psutil
import torch

from megarl.machine.garbage import without_collections
from megarl.machine.ports import listen
from megarl.rollout.sglang.backend import leave_last_words


def run_scheduler(server_args: Any, *arguments: Any, **keywords: Any) -> Any:
    """Run one rank of the model. Passed to SGLang as its `run_scheduler_process_func`."""
    with without_collections():
        adapt_scheduler(
            server_args.device,
            server_args.nnodes,
            server_args.pp_size,
            is_drafting=server_args.speculative_algorithm is not None,
        )
        from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(server_args, *arguments, **keywords)


def adapt_scheduler(
    device: str, num_nodes: int = 1, num_stages: int = 1, *, is_drafting: bool = False
) -> None:
    """Adapt this process before the scheduler starts.

    Args:
        device: cpu or cuda.
        num_nodes: The nodes of the engine.
        num_stages: The pipeline stages of the engine.
        is_drafting: Whether it decodes speculatively.
    """
    _end_alone()
    hide_training_packages()
    _listen_on_one_address()
    if num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    if device == "cpu":
        from megarl.rollout.sglang import cpu_adaptations, cpu_speculation

        cpu_adaptations.install_in_scheduler()
        if is_drafting:
            cpu_speculation.install_speculation()

    _fall_asleep_together()
    if num_stages > 1:
        _forward_requests_at_once()


def run_detokenizer(*arguments: Any, **keywords: Any) -> Any:
    _end_alone()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*arguments, **keywords)


def hide_training_packages() -> None:
    """Make imports of Megatron-Core and Transformer Engine in this process fail, as if not installed.

    SGLang's tool for dumping tensors imports Megatron-Core if it is installed, and with it Transformer Engine
    on CUDA. In each scheduler, that would cost 200 MB or more, seconds of startup, and a second cuDNN,
    without any use.
    """
    for name in ("megatron", "transformer_engine"):
        # Importing a module that is None raises ImportError.
        # pyrefly: ignore[no-matching-overload]
        sys.modules.setdefault(name, None)


def _end_alone() -> None:
    """Make a failing SGLang process end itself instead of signaling its parent.

    Its SIGQUIT would kill a Ray worker without any output.

    The error is logged, and the process that started the engine finds it dead.
    """
    send_signal = psutil.Process.send_signal

    def send(self: psutil.Process, sig: int) -> None:
        if sig == signal.SIGQUIT and self.pid == os.getppid():
            leave_last_words(traceback.format_exc())  # called while the error is handled
            logging.shutdown()
            os._exit(1)
        send_signal(self, sig)

    psutil.Process.send_signal = send


def _listen_on_one_address() -> None:
    """Make torch's store listen only on the address where the engine's ranks meet.

    It is 127.0.0.1, or an address of the first of several nodes. The store would listen on every interface,
    without a password.
    """
    # a function hides the module of that name
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    open_store = rendezvous.TCPStore

    def make(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *more: Any,
        **options: Any,
    ) -> Any:
        # Only the rank that creates the store listens: give it a socket of this one address.
        if is_master:
            options["master_listen_fd"] = listen(host_name, port).detach()
        return open_store(host_name, port, world_size, is_master, *more, **options)

    rendezvous.TCPStore = make  # pyrefly: ignore[missing-attribute]


def _fall_asleep_together() -> None:
    """Make all ranks release memory before the first one responds.

    Its response stands for all ranks, and the caller relies on the memory of all.
    """
    from sglang.srt.distributed.parallel_state import get_world_group
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Manager,
    )

    release = Manager.release_memory_occupation

    def release_together(self: Any, recv_req: Any) -> Any:
        answer = release(self, recv_req)
        torch.distributed.barrier(get_world_group().cpu_group)
        return answer

    Manager.release_memory_occupation = release_together


def _forward_requests_at_once() -> None:
    """Make each pipeline stage forward requests to the next one before it executes them.

    SGLang executes them first. A weight sync would then reach the stages one after the other, and a stage
    that waits for another one, as all of them do at the end of a sync, would wait forever.
    """
    from sglang.srt.managers.scheduler import Scheduler

    execute = Scheduler.process_input_requests
    send = Scheduler._pp_send_pyobj_to_next_stage
    sent: list[Any] = []

    def forward_and_execute(self: Any, recv_reqs: list[Any]) -> Any:
        if not self.pp_group.is_last_rank:
            self._pp_commit_comm_work(self.send_req_work)  # the previous requests
            sent[:] = send(self, recv_reqs, async_send=True)
        return execute(self, recv_reqs)

    Scheduler.process_input_requests = forward_and_execute
    Scheduler._pp_send_pyobj_to_next_stage = lambda self, data, async_send=False: list(sent)
