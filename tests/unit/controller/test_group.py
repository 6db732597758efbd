"""Worker groups on real Ray: every dispatch mode, fused roles, futures between groups.

The mesh is dp=2, tp=2.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.controller.actors import LearnedLimits
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import DerivedFuture, gather, wait_for_any
from megarl.controller.group import RayWorkerGroup
from megarl.controller.messages import FailureKind
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, create_colocated_worker_cls
from megarl.machine.processors import usable_cores
from tests.unit.controller.workers import BrokenWorker, CollectiveWorker, EchoWorker, LayoutOfThree


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([4], use_gpu=False, name="train")
    spec = RayClassWithInitArgs(EchoWorker, 2, label="tp2")
    yield (
        group := RayWorkerGroup(
            pool, spec, role="actor", environment={"GREETING": "hello"}, at_work={"actor": {"about": 1}}
        )
    )
    group.shutdown()
    pool.release()


@pytest.fixture(scope="module")
def fused(ray_cluster: None) -> Iterator[dict]:
    """Two roles in each of two processes, on a separate pool. Every rank is a replica."""
    pool = RayResourcePool([2], use_gpu=False, name="judge")
    roles = {
        "critic": RayClassWithInitArgs(EchoWorker, label="c"),
        "reward": RayClassWithInitArgs(EchoWorker, label="r"),
    }
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles))
    with pytest.raises(ValueError, match=r"one of the groups that spawn\(\) returns"):
        group.call(EchoWorker.about)
    yield group.spawn()
    group.shutdown()
    pool.release()


def numbered(num_rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"uid": [f"u{row}" for row in range(num_rows)]})


def test_the_environment_is_there_before_torch_and_the_constructor(group: RayWorkerGroup) -> None:
    assert group.ready.get() == []
    about = group.call(EchoWorker.about)
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_RANK"], one["rank"]) for one in about] == [
        (str(r), "4", str(r), r) for r in range(4)
    ]
    assert {(one["threads"], one["OMP_NUM_THREADS"], one["GREETING"], one["label"]) for one in about} == {
        (1, "1", "hello", "tp2")
    }

    # User settings are respected. Here the tests set them for the driver.
    assert {one["threads_now"] for one in about} == {1}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in about}) == 1
    assert len({one["pid"] for one in about}) == 4
    assert {(one["role"], one["node"]) for one in about} == {("actor", "127.0.0.1")}


def test_workers_have_the_priority_of_the_driver(group: RayWorkerGroup) -> None:
    """Ray's default niceness of 15 leaves workers a thirtieth of a core that another process keeps busy."""
    assert {psutil.Process(about["pid"]).nice() for about in group.call(EchoWorker.about)} == {
        psutil.Process().nice()
    }


def test_processes_that_compute_side_by_side_share_the_cores(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shares depend on the method, for each role in the process."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    pool = RayResourcePool([1], use_gpu=False, name="cores")
    roles = {role: RayClassWithInitArgs(EchoWorker) for role in ("actor", "reference")}
    at_work = {"actor": {"about": 1}, "reference": {"about": 1000}}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), at_work=at_work)

    try:
        actor, reference = group.spawn().values()
        seen = [each.call(EchoWorker.about)[0]["threads_now"] for each in (actor, reference, actor)]
    finally:
        group.shutdown()
        pool.release()

    assert seen == [usable_cores(), 1, usable_cores()]


def test_rank_zero_and_all_to_all(group: RayWorkerGroup) -> None:
    assert group.call(EchoWorker.who) == 0
    assert group.call(EchoWorker.add_rank, [1, 2, 3, 4], factor=[10, 10, 10, 100]) == [10, 21, 32, 403]


def test_data_parallel_splits_over_all_ranks(group: RayWorkerGroup) -> None:
    result = group.call(EchoWorker.square, numbered(6))
    assert result.batch["square"].tolist() == [0, 1, 4, 9, 16, 25]
    assert result.batch["rank"].tolist() == [0, 0, 1, 1, 2, 2]  # rank 3 had the padding


def test_mesh_splits_over_replicas_and_hears_their_first_rank(group: RayWorkerGroup) -> None:
    result = group.call(EchoWorker.scale, numbered(5), factor=3)
    assert result.batch["scaled"].tolist() == [0, 3, 6, 9, 12]
    assert result.batch["rank"].tolist() == [0, 0, 0, 2, 2]
    assert result.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2", "u3", "u4"]
    assert group.call(EchoWorker.expand, numbered(3), 2).batch["x"].tolist() == [0, 0, 1, 1, 2, 2]


def test_parts_that_the_caller_planned(group: RayWorkerGroup) -> None:
    parts = [numbered(3), numbered(1)]
    assert group.call(EchoWorker.count, parts) == [{"rows": 3, "rank": 0}, {"rows": 1, "rank": 2}]
    results = group.call(EchoWorker.scale, parts, 2)
    assert [result.batch["scaled"].tolist() for result in results] == [[0, 2, 4], [0]]
    with pytest.raises(ValueError, match="padded by 1"):
        group.call(EchoWorker.count, numbered(3))


def test_calls_name_the_method_itself(group: RayWorkerGroup) -> None:
    assert group.call(EchoWorker.who) == 0
    assert group.call(EchoWorker.size_of, [5]).get() == [("list", 1)] * 4
    assert [
        part.batch["scaled"].tolist()
        for part in group.call(EchoWorker.scale, [numbered(2), numbered(3)], factor=3)
    ] == [
        [0, 3],
        [0, 3, 6],
    ]
    assert group.call_all(EchoWorker.who).get() == [0, 1, 2, 3]
    assert group.call_rank(3, EchoWorker.who).get() == 3
    with pytest.raises(ValueError, match="ranks 0 to 3, not 4"):
        group.call_rank(4, EchoWorker.who)

    with pytest.raises(
        ValueError, match="EchoWorker, the worker of role 'actor', has no method CollectiveWorker.sum_ranks"
    ):
        group.call(CollectiveWorker.sum_ranks)


def test_fused_roles_share_processes(fused: dict) -> None:
    critic = fused["critic"].call(EchoWorker.about)
    reward = fused["reward"].call(EchoWorker.about)
    assert [one["pid"] for one in critic] == [one["pid"] for one in reward]
    assert [(one["role"], one["label"]) for one in critic + reward] == [("critic", "c")] * 2 + [
        ("reward", "r")
    ] * 2
    assert fused["critic"].world_size == 2


def test_a_future_is_refused_as_an_argument(group: RayWorkerGroup, fused: dict) -> None:
    doubled = group.call(EchoWorker.scale_later, numbered(5), 2)
    with pytest.raises(ValueError, match=r"pass future.get\(\)"):
        fused["critic"].call(EchoWorker.scale_later, doubled, 10)
    joined = numbered(5).select(non_tensor_batch_keys=["uid"], batch_keys=[]).union(doubled)
    assert joined.batch["x"].tolist() == [0, 2, 4, 6, 8]


def test_gather_waits_for_groups_together_and_spans_tell_when(
    group: RayWorkerGroup, fused: dict, tmp_path: Path
) -> None:
    for one in (group, *fused.values()):
        one.drain_spans()
    meetings = [each.call(EchoWorker.meet, str(tmp_path), 6) for each in (group, fused["critic"])]
    assert gather(*meetings) == [[0, 1, 2, 3], [0, 1]]
    spans = group.drain_spans() + fused["critic"].drain_spans()
    assert sorted({(span.pool, span.role, span.name) for span in spans}) == [
        ("judge", "critic", "meet"),
        ("judge", "critic", "waiting"),
        ("train", "actor", "meet"),
        ("train", "actor", "waiting"),
    ]
    assert len(spans) == 2 * 6

    # Both groups were running at the same time.
    assert max(span.start_s for span in spans) < min(span.end_s for span in spans)
    assert group.drain_spans() == fused["reward"].drain_spans() == []
    naps = [each.call(EchoWorker.sleep, 0) for each in (group, fused["critic"])]
    both = DerivedFuture(naps, lambda results: sum(map(sum, results)))
    assert gather(both, group.call(EchoWorker.size_of, [5])) == [0 + 1 + 2 + 3 + 0 + 1, [("list", 1)] * 4]
    with pytest.raises(TimeoutError, match=r"actor.sleep has not finished after 0.1 s"):
        group.call(EchoWorker.sleep, 0.5).get(timeout=0.1)


def test_one_batch_is_stored_once_per_replica(group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    import megarl.controller.actors as module

    stored: list[object] = []
    put = module.ray.put
    monkeypatch.setattr(module.ray, "put", lambda value: (stored.append(value), put(value))[1])
    group.call(EchoWorker.scale, numbered(4), 1)
    assert [len(value) for value in stored] == [2, 2]


def test_ranks_meet_at_the_address_they_are_given(ray_cluster: None) -> None:
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(CollectiveWorker), environment={"GLOO_SOCKET_IFNAME": "lo"}
    )
    assert group.call(CollectiveWorker.sum_ranks) == [1, 1]
    group.shutdown()
    pool.release()


def test_a_single_rank_that_is_stopped_is_noticed_within_its_learned_limit(ray_cluster: None) -> None:
    """SIGSTOP: the process does not even say what it is doing, but its earlier calls have ended."""
    pool = RayResourcePool([1], use_gpu=False, name="alone")
    learned = LearnedLimits(("about",), factor=2.0, floor_s=0.5)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(EchoWorker), learned_limits=learned)
    for _ in range(4):  # before these, no limit is learned
        group.call(EchoWorker.about)
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(PhaseTimeoutError, match="learned from its earlier calls") as hung:
        group.call(EchoWorker.about)
    assert [report.activity for report in hung.value.reports] == [None]
    pool.release()


def test_a_constructor_that_fails_is_reported_for_whatever_is_called(ray_cluster: None) -> None:
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(BrokenWorker, rank=1), role="reference")

    with pytest.raises(
        RuntimeError, match=r"reference rank 1 (.|\n)*in __init__: FileNotFoundError: no model in /nowhere"
    ):
        group.call(BrokenWorker.work)

    with pytest.raises(RuntimeError, match="no model in /nowhere"):
        group.ready.get()
    group.shutdown()
    with pytest.raises(RuntimeError, match="reference.work: the group has been ended"):
        group.call(BrokenWorker.work)
    pool.release()


def test_classes_that_cannot_work_are_refused(ray_cluster: None) -> None:
    with pytest.raises(ValueError, match="not a subclass"):
        RayClassWithInitArgs(dict)
    with pytest.raises(ValueError, match="there are no roles"):
        create_colocated_worker_cls({})
    pool = RayResourcePool([1], use_gpu=False)

    with pytest.raises(
        ValueError, match="role 'actor' has a layout of 3 ranks, but its pool 'pool' has 1 process"
    ):
        RayWorkerGroup(pool, RayClassWithInitArgs(LayoutOfThree), role="actor")

    pool.release()


@pytest.mark.parametrize(
    ("kind", "text", "how", "is_lost"),
    [
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered\nSearch for `cuda...", "itself", True),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "itself", True),
        ("AcceleratorError", "CUDA error: unspecified launch failure", "itself", True),
        ("AcceleratorError", "CUDA error: unknown error", "cause", True),
        ("AcceleratorError", "CUDA error: uncorrectable NVLink error detected", "context", True),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`", "itself", True),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "itself", True),
        ("RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered", "itself", True),
        ("RuntimeError", "/te/cudnn.cpp:12 in function f: CUDA Error: an illegal instruction was encountered", "itself", True),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "itself", False),
        ("AcceleratorError", "CUDA error: out of memory", "itself", False),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "itself", False),
        ("AcceleratorError", "CUDA error: device-side assert triggered", "itself", False),
        ("AcceleratorError", "CUDA error: invalid configuration argument", "itself", False),
        ("AcceleratorError", "CUDA error: no kernel image is available for execution on the device", "itself", False),
        ("ValueError", "the text says CUDA error: an illegal memory access was encountered", "itself", False),
        ("RuntimeError", "the size of tensor a must match", "cause", False),
    ],
)  # fmt: skip
def test_an_error_of_the_gpu_is_a_loss_of_the_process(
    group: RayWorkerGroup, kind: str, text: str, how: str, is_lost: bool
) -> None:
    """The texts are those of torch, cuBLAS, cuDNN, Triton and Transformer Engine."""
    with pytest.raises(WorkerError) as caught:
        group.call(EchoWorker.fail_with, kind, text, how)
    assert caught.value.kind is (FailureKind.device if is_lost else FailureKind.exception)
    assert caught.value.kind.is_loss == is_lost
    assert text.splitlines()[0] in caught.value.remote_traceback


def test_waiting_for_whichever_ends_first(group: RayWorkerGroup, fused: dict) -> None:
    """Futures may end successfully or not; `get` shows which. After the timeout, the result may be empty."""
    group.call(EchoWorker.about)  # both are running
    slow = fused["critic"].call_rank(0, EchoWorker.sleep, 5.0)
    failed = group.call_rank(0, EchoWorker.fail_on, 0)
    assert wait_for_any([slow, failed], timeout=60) == [failed]
    with pytest.raises(WorkerError) as caught:
        failed.get()
    assert (caught.value.kind, caught.value.error_type) == (FailureKind.exception, "builtins.KeyError")
    assert wait_for_any([slow], timeout=0.0) == []
    assert wait_for_any([slow], timeout=60) == [slow]
    assert group.pids[0] == group.call(EchoWorker.about)[0]["pid"]
