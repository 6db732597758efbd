"""Pool of rank processes for tests: real torch.distributed over gloo, with imports once per session.

    results = rank_pool.run(function, world_size=2, argument=...)   # list of the ranks' results

`function` is a module-level function; it is called in ranks 0..world_size-1 with the default process group
ready. An exception in a rank ends the pool and is re-raised here with the rank's traceback.
"""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import queue
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.machine.garbage import collect_rarely
from megarl.machine.gloo import share_device

MAX_RANKS = 4
ANSWER_LIMIT_S = 300


class _Pickler(pickle.Pickler):
    """Pickle tensors as arrays of numpy: torch's own format costs a tensor about half a millisecond."""

    dispatch_table = copyreg.dispatch_table.copy()


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.requires_grad:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if tensor.dtype is torch.bfloat16:
        return _bfloat16, (tensor.contiguous().view(torch.int16).numpy(),)
    return torch.from_numpy, (tensor.contiguous().numpy(),)


def _bfloat16(words: Any) -> torch.Tensor:
    return torch.from_numpy(words).view(torch.bfloat16)


_Pickler.dispatch_table[torch.Tensor] = _reduce_tensor


def _dumps(value: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(value)

    return written.getvalue()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by the group's ranks. Each rank gets copies."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, _dumps(value), group=group)

    return [pickle.loads(part) for part in gathered]


def _serve(rank: int, store_dir: str, inbox: mp.Queue, outbox: mp.Queue) -> None:
    torch.set_num_threads(1)
    share_device()
    collect_rarely()

    while (call := inbox.get()) is not None:
        call_id, world_size, work = call
        try:
            num_modules = len(sys.modules)
            function, arguments = pickle.loads(work)
            if len(sys.modules) > num_modules:
                gc.freeze()  # what was imported is not visited by the collection after each call
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store_dir}/{call_id}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=120),
            )
            # A function without collectives may end, and its rank close its connections, while another rank
            # still connects to it. Only a rank that has connected to all others reaches the barrier.
            dist.barrier()
            try:
                outbox.put((rank, True, _dumps(function(**arguments))))
            finally:
                dist.destroy_process_group()
                # a model's reference cycles contain its process groups, each with threads and connections
                gc.collect()
        except BaseException:  # noqa: BLE001  (the boundary of a process: the traceback goes to the test)
            outbox.put((rank, False, traceback.format_exc()))


class RankPool:
    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._store = tempfile.TemporaryDirectory()
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(MAX_RANKS)]
        self._processes = [
            context.Process(target=_serve, args=(rank, self._store.name, inbox, self._outbox), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        self._hung = False
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *, world_size: int, **arguments: Any) -> list[Any]:
        """Run the function, and return the results in the order of ranks.

        Arguments and results are sent by value: a torch queue sends a file descriptor for each tensor, which
        is open as long as the tensor lives, and a process may have as few as 1,024 of them.

        A rank that does not answer in time (a collective that its peers do not reach) makes the pool
        unusable, so that the next tests fail immediately instead of waiting as long.
        """
        assert not self._hung, "a rank of an earlier test hangs; the first failure is the one to look at"
        call_id = uuid.uuid4().hex
        work = _dumps((function, arguments))
        for inbox in self._inboxes[:world_size]:
            inbox.put((call_id, world_size, work))
        results: dict[int, Any] = {}
        failures = []

        while len(results) + len(failures) < world_size:
            rank, good, value = self._answer(failures)
            if good:
                results[rank] = pickle.loads(value)
            else:
                failures.append(f"rank {rank}:\n{value}")

        if failures:
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(world_size)]

    def _answer(self, failures: Sequence[str]) -> tuple[int, bool, Any]:
        """Return the next rank's answer. `failures` are those of other ranks, because of which it may never
        come."""
        self._hung = True
        end_s = time.monotonic() + ANSWER_LIMIT_S

        while True:
            try:
                answer = self._outbox.get(timeout=5)
            except queue.Empty:
                dead = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
                assert not dead, f"ranks {dead} have ended"
                assert time.monotonic() < end_s, "\n".join(
                    [f"a rank has not answered for {ANSWER_LIMIT_S} s", *failures]
                )
            else:
                self._hung = False
                return answer

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

        self._store.cleanup()
