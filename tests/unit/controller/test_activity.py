"""Test what a process reports about itself while it works and while it hangs."""

import threading

from megarl.config.schema import RankCoordinate
from megarl.controller.messages import Activity, Location
from megarl.controller.worker import Worker

HERE = Location("localhost", 1, "")


def wait_inside(release: threading.Event, entered: threading.Event) -> None:
    entered.set()
    release.wait(timeout=10)


def test_a_hanging_thread_is_described_from_outside() -> None:
    activity = Activity()
    release = threading.Event()
    entered = threading.Event()

    def work() -> None:
        with activity.call("update"), activity.phase("forward"), activity.phase("reduce"):
            wait_inside(release, entered)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(timeout=10)
    report = activity.report(HERE)
    release.set()
    thread.join()
    assert (report.method, report.phase) == ("update", "forward > reduce")
    assert "in wait_inside" in report.stack
    assert activity.report(HERE).method is None


def test_spans_hold_the_call_and_its_phases() -> None:
    activity = Activity()
    for _ in range(2):  # the second call's spans replace the first's
        with activity.call("update"):
            with activity.phase("forward"):
                pass
            with activity.phase("step"):
                pass

    spans = activity.spans()
    assert [span.name for span in spans] == ["update", "forward", "step"]
    assert (
        spans[0].start_s
        <= spans[1].start_s
        <= spans[1].end_s
        <= spans[2].start_s
        <= spans[2].end_s
        <= spans[0].end_s
    )


def test_a_worker_outside_a_group_is_rank_zero_of_one() -> None:
    worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.role) == (0, 1, 0, "worker")
    # each is a replica
    assert worker.mesh(2) == (RankCoordinate(0, 0, 0, 0), RankCoordinate(1, 0, 0, 0))
    with worker.phase("anything"):
        pass
