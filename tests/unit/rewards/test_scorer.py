import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from megarl.config.schema import RewardFunctionConfig
from megarl.rewards.process import RewardFunctionError, function_labels
from megarl.rewards.scorer import RewardError, RewardScorer, ScoreRequest
from tests.unit.rewards import functions_under_test
from tests.unit.rewards.outcome_columns import column, declared, errors

FILE = functions_under_test.__file__
COMPUTE_SCORE = RewardFunctionConfig(path=FILE)


def requests(*solutions):
    return [
        ScoreRequest(
            uid=f"u{i}", data_source="s", solution_str=text, ground_truth="5", extra_info={"answer": "5"}
        )
        for i, text in enumerate(solutions)
    ]


@pytest.fixture(scope="module")
def scorer():
    """Return a lenient scorer, which reports errors without raising."""
    with RewardScorer([COMPUTE_SCORE], time_limit_s=1.0, max_error_rate=1.0, num_processes=2) as scorer:
        yield scorer


def process_ids(scorer):
    return {int(score) for score in column(scorer.score(requests(*["process"] * 20)), "score")}


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition, limit_s=20):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_numbers_truth_values_and_dicts_are_scores(scorer):
    report = scorer.score(requests("right", "equal", "dict", "wrong"))
    assert column(report, "score") == [1.0, 1.0, 0.5, 0.0]
    assert errors(report) == {}
    assert column(report, "numbers") == [{}, {}, {"format": 1.0}, {}]  # not `score` itself
    assert [error is None for error in column(report, "error")] == [True] * 4


def test_each_failure_is_reported_for_its_sample_and_the_others_are_scored(scorer):
    solutions = ["right", "raise", "die", "sleep", "hang in C", "nan", "text", "no score", "exit", "right"]
    report = scorer.score(requests(*solutions))
    assert column(report, "score") == [1.0] + [0.0] * 8 + [1.0]
    assert list(errors(report)) == [1, 2, 3, 4, 5, 6, 7, 8]
    messages = list(errors(report).values())
    assert messages[0].startswith(
        "compute_score raised ZeroDivisionError: division by zero (functions_under_test.py:"
    )
    assert "exit code" in messages[1]
    assert "-9" in messages[1]
    assert messages[2] == messages[3] == "it took more than reward.time_limit_s=1 s and was killed"
    assert messages[4] == "compute_score returned the float nan as its score, expected a finite number"
    assert messages[5] == "compute_score returned the str '1.0' as its score, expected a finite number"
    assert "a dict without 'score', with the keys ['points']" in messages[6]
    assert "raised SystemExit: 3" in messages[7]


def test_what_a_sample_that_takes_too_long_has_started_ends_with_it(scorer, tmp_path):
    file = tmp_path / "pids"
    slow = requests("sleep with children")[0]._replace(extra_info={"pids": str(file)})
    report = scorer.score([slow, *requests("right")])
    assert errors(report) == {0: "it took more than reward.time_limit_s=1 s and was killed"}
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == 2
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_the_run_stops_above_the_error_rate_and_shows_each_reason_once():
    with RewardScorer([COMPUTE_SCORE], time_limit_s=5.0, max_error_rate=0.25, num_processes=1) as scorer:
        assert len(errors(scorer.score(requests("raise", "right", "right", "right")))) == 1
        with pytest.raises(RewardError) as caught:
            # 3 of 9 exceed a quarter, so the sleeping samples are not awaited
            scorer.score(requests("raise", "right", "nan", "raise", *["sleep"] * 5))
        title, *reasons, _ = str(caught.value).splitlines()
        assert "failed for at least 3 of 9 samples, more than reward.max_error_rate=0.25 allows" in title
        assert reasons[0].startswith(
            "  2 samples, such as sample 0 (uid u0): compute_score raised ZeroDivisionError"
        )
        assert reasons[1].startswith("  sample 2 (uid u2): compute_score returned the float nan")
        assert len(reasons) == 2
        assert column(scorer.score(requests("right")), "score") == [1.0]  # the scorer can be used again


def test_a_failure_behind_a_slow_sample_ends_the_scoring():
    with RewardScorer([COMPUTE_SCORE], time_limit_s=1000.0, max_error_rate=0.0, num_processes=2) as scorer:
        samples = requests("sleep", "right", "raise")
        with pytest.raises(RewardError, match=r"at least 1 of 3 samples.*\n  sample 2 \(uid u2\)"):
            scorer.score(samples)
        with pytest.raises(RewardError, match=r"sample 2 \(uid u2\)"):
            scorer.score([*scorer.begin(samples[:1]), *samples[1:]])


def test_weights_combine_functions():
    functions = [
        RewardFunctionConfig(path=FILE, weight=2.0),
        RewardFunctionConfig(path=f"{FILE}:length", weight=-0.1),
    ]
    with RewardScorer(functions, time_limit_s=5.0, max_error_rate=0.0, num_processes=1) as scorer:
        report = scorer.score(requests("right"))
        of_dict = column(scorer.score(requests("dict")), "numbers")

    assert column(report, "score") == pytest.approx([2.0 * 1.0 - 0.1 * 5])
    assert column(report, "numbers") == [
        {"functions_under_test.compute_score": 1.0, "functions_under_test.length": 5.0}
    ]
    assert of_dict[0]["functions_under_test.compute_score/format"] == 1.0
    assert column(report, "parts") == [(1.0, 5.0)]  # before weights
    assert column(report, "answer") == [None]


def test_labels_of_functions_are_unique():
    same = [RewardFunctionConfig(path=path) for path in ("a/reward.py", "b/reward.py", "c/other.py")]
    assert function_labels(same) == [
        "reward.compute_score.0",
        "reward.compute_score.1",
        "other.compute_score",
    ]
    assert function_labels(same[:1]) == ["compute_score"]


def test_a_function_returns_answers_for_all_samples_of_a_data_source_or_for_none():
    """The existence of maj@k must not depend on a sample."""
    keys_of = RewardFunctionConfig(path=f"{FILE}:keys_of")
    samples = requests('{"answer": "5"}', '{"answer": null}', "{}", '{"answer": 5}', '{"model": 1}')

    with RewardScorer([keys_of], time_limit_s=20.0, max_error_rate=1.0, num_processes=1) as scorer:
        report = scorer.score([*samples, samples[2]._replace(data_source="without answers")])
        later = scorer.score(requests("{}"))

    assert column(report, "answer") == ["5", None, None, None, None, None]
    assert declared(report) == [True, True, False, False, False, False]
    assert [error is None for error in column(report, "error")] == [True, True, False, False, False, True]
    said = list(errors(report).values())
    assert said[0].startswith(
        "keys_of returned no 'answer' for it, but one for other samples of 's'; return this key for all "
        "samples"
    )
    assert said[1].startswith(
        "keys_of returned the int 5 as its answer, expected a normalized string, or None"
    )
    assert (
        said[2]
        == "keys_of returned 'model', but reward/model/mean is a metric of the reward model; give it another name"
    )
    assert later[0].error == said[0]  # also in the next batch


def test_a_process_that_is_killed_while_idle_is_replaced(scorer):
    victim = process_ids(scorer).pop()
    os.kill(victim, signal.SIGKILL)
    assert column(scorer.score(requests(*["right"] * 10)), "score") == [1.0] * 10
    time.sleep(0.5)  # the idle pool has noticed by now
    assert column(scorer.score(requests(*["right"] * 10)), "score") == [1.0] * 10
    assert victim not in process_ids(scorer)


def test_reward_processes_do_not_import_torch(scorer):
    assert column(scorer.score(requests("torch")), "score") == [0.0]


def test_large_texts_pass(scorer):
    assert column(scorer.score(requests(*["x" * 300_000] * 10)), "score") == [0.0] * 10


def test_nothing_is_left_after_close():
    scorer = RewardScorer([COMPUTE_SCORE], time_limit_s=100.0, max_error_rate=1.0, num_processes=2)
    pids = process_ids(scorer)
    scorer.close()
    assert pids
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


OWNER = """
import threading
from megarl.config.schema import RewardFunctionConfig
from megarl.rewards.scorer import RewardScorer, ScoreRequest
scorer = RewardScorer([RewardFunctionConfig(path={file!r})], 1000.0, 1.0, 2)
request = ScoreRequest(uid="u", data_source="s", solution_str="process", ground_truth="", extra_info={{}})
print(*(int(outcome.score) for outcome in scorer.score([request] * 20)), flush=True)
scorer.score([request._replace(solution_str=text) for text in ("hang in C", "sleep")])
"""  # without `if __name__ == "__main__":`, which a script needs for processes that begin with it


def test_nothing_is_left_when_the_owner_is_killed(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(file=FILE))
    owner = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    pids = {int(pid) for pid in owner.stdout.readline().split()}
    family = pids | {child.pid for child in psutil.Process(owner.pid).children(recursive=True)}
    time.sleep(0.3)  # the processes are scoring a sample
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert pids
    assert wait_until(lambda: not any(is_running(pid) for pid in family)), (
        "reward processes outlive their owner"
    )


def test_functions_that_cannot_be_loaded_are_refused_at_the_start(tmp_path):
    with pytest.raises(RewardFunctionError, match="absent.py': there is no such file"):
        RewardScorer([RewardFunctionConfig(path=str(tmp_path / "absent.py"))], 1.0, 0.0, 1)
    with pytest.raises(RewardFunctionError, match=r"reward.functions is empty; give at least one"):
        RewardScorer([], 1.0, 0.0, 1)


def test_processes_outlive_the_thread_that_made_the_scorer():
    def make():
        scorer = RewardScorer([COMPUTE_SCORE], 5.0, 0.0, 1)
        return scorer, process_ids(scorer)

    with ThreadPoolExecutor(max_workers=1) as thread:
        scorer, pids = thread.submit(make).result()
    with scorer:
        time.sleep(0.3)
        assert process_ids(scorer) == pids


NO_OPINION = """
def lengths(solution_str, **kwargs):
    return None if "a" in solution_str else len(solution_str)

def votes(solution_str, **kwargs):
    if "b" in solution_str:
        return {"score": None, "seen": 1}
    return {"score": 2.0, "answer": solution_str} if "c" not in solution_str else None
"""


@pytest.mark.parametrize("sandbox", [False, True])
def test_none_is_no_opinion(tmp_path, sandbox):
    """The function is left out of the sum for that sample. A sample that nothing scores has failed."""
    (tmp_path / "f.py").write_text(NO_OPINION)
    functions = [
        RewardFunctionConfig(path=f"{tmp_path / 'f.py'}:lengths", weight=0.5, sandbox=sandbox),
        RewardFunctionConfig(path=f"{tmp_path / 'f.py'}:votes", weight=3.0, sandbox=sandbox),
    ]
    with RewardScorer(functions, 20.0, 1.0, 1) as scorer:
        report = scorer.score(requests("xxc", "xx", "a", "xb", "ab"))
        # A function that had no opinion may still declare its answers later, and not otherwise.
        mixed = scorer.score(requests("bx", "yy"))
    assert column(report, "score") == [0.5 * 3, 0.5 * 2 + 3 * 2, 3 * 2, 0.5 * 2, 0.0]
    assert [[str(part) for part in parts] for parts in column(report, "parts")] == [
        ["3.0", "nan"],
        ["2.0", "2.0"],
        ["nan", "2.0"],
        ["2.0", "nan"],
        ["0.0", "0.0"],
    ]
    assert column(report, "numbers") == [
        {"f.lengths": 3.0},
        {"f.lengths": 2.0, "f.votes": 2.0},
        {"f.votes": 2.0},
        {"f.lengths": 2.0, "f.votes/seen": 1.0},
        {},
    ]
    assert [error is None for error in column(report, "error")] == [True, True, True, True, False]
    assert list(errors(report).values()) == [
        "f.lengths and f.votes returned None (no opinion), and nothing else scores the sample"
    ]
    assert column(report, "answer") == [None, "xx", "a", None, None]
    assert declared(report) == [True, True, True, True, False]
    assert errors(mixed) == {}

    with RewardScorer(functions, 20.0, 1.0, 1, scored_elsewhere=True) as scorer:
        report = scorer.score(requests("ab"))
    assert (column(report, "score"), errors(report), declared(report)) == ([0.0], {}, [False])


def test_the_only_function_may_not_be_silent(tmp_path):
    (tmp_path / "f.py").write_text("def compute_score(**kwargs):\n    pass\n")
    with RewardScorer([RewardFunctionConfig(path=str(tmp_path / "f.py"))], 20.0, 1.0, 1) as scorer:
        report = scorer.score(requests("a"))
    assert list(errors(report).values()) == [
        "compute_score returned None (no opinion), and nothing else scores the sample"
    ]
