"""Samples that run as programs within the reward function, in the sandbox of `reward.functions[].sandbox`."""

import json
import socket

import pytest

from megarl.config.schema import RewardFunctionConfig, RewardSandboxConfig
from megarl.rewards import process
from megarl.rewards.process import RewardFunctionError
from megarl.rewards.scorer import RewardScorer, ScoreRequest
from tests.unit.rewards import runs_its_sample
from tests.unit.rewards.outcome_columns import column

SANDBOXED = RewardFunctionConfig(path=runs_its_sample.__file__, sandbox=True)


@pytest.fixture(scope="module")
def scorer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWARD_SECRET", "hunter2")
        patch.setenv("REWARD_NAMED", "named")
        named = RewardSandboxConfig(memory_mb=64, environment=["REWARD_NAMED"])
        with RewardScorer(
            [SANDBOXED], time_limit_s=10.0, max_error_rate=1.0, num_processes=1, sandbox=named
        ) as scorer:
            yield scorer


def score(scorer, *programs, given=None):
    requests = [
        ScoreRequest(f"u{number}", "s", program, None, given or {}) for number, program in enumerate(programs)
    ]
    report = scorer.score(requests)
    return [outcome.score if outcome.error is None else outcome.error for outcome in report]


def test_a_sample_sees_nothing_of_another_and_only_named_variables(scorer):
    assert score(scorer, *["counted['samples'] += 1; score = counted['samples']"] * 3) == [1.0, 1.0, 1.0]
    patches = "import builtins, random; builtins.float = int; random.random = None; score = 1"
    assert score(scorer, patches, "import random; score = float('2.5') + 0 * random.random()") == [1.0, 2.5]
    everything = "import os; score = float({} in [*os.environ.values(), *seen.values()])"
    assert score(scorer, everything.format("'hunter2'"), everything.format("'named'")) == [0.0, 1.0]


def test_what_a_sample_may_not_do_is_its_error(scorer, tmp_path):
    (tmp_path / "answers.json").write_text("42")
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = score(
            scorer,
            f"score = int(open({str(tmp_path / 'answers.json')!r}).read())",
            f"open({str(tmp_path / 'new')!r}, 'w')",
            f"import socket; socket.create_connection({server.getsockname()!r}); score = 1",
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM); score = 1",
            "import subprocess; subprocess.run(['true']); score = 1",
            "import os; os.kill(os.getppid(), 9); score = 1",
            "kept = bytearray(2**30); score = 1",
            "import os; os._exit(0)",
            "import sys; sys.exit(4)",
            "score = 'five'",
            "while True: pass",
            "score = 7",
        )

    assert said[0].startswith("compute_score raised PermissionError: [Errno 13] Permission denied")
    assert said[1].startswith("compute_score raised PermissionError: [Errno 13] Permission denied")
    assert all(
        message.startswith("compute_score raised PermissionError: [Errno 1] Operation not permitted")
        for message in said[2:6]
    )
    assert said[6].startswith("compute_score raised MemoryError")
    assert said[7] == "compute_score ended its process (status 0) without an answer"
    assert said[8].startswith("compute_score raised SystemExit: 4")
    assert said[9] == "compute_score returned the str 'five' as its score, expected a finite number"
    assert said[10] == "it took more than reward.time_limit_s=10 s and was killed"
    assert said[11] == 7.0
    assert [path.name for path in tmp_path.iterdir()] == ["answers.json"]


def test_a_forged_result_of_a_program_is_checked_like_any_other(scorer):
    """A program can forge the score of its own sample, because it runs in the process that scores it, but
    nothing else."""
    say = (
        "import os\nfor number in range(3, 64):\n    try: os.write(number, {!r})\n    except OSError: "
        "pass\nos._exit(0)"
    )
    forged = [b"x" * 100_000, b"[1", json.dumps(["value", 3]).encode(), b'["value", [{"score": NaN}, null]]']
    said = score(scorer, *(say.format(text) for text in forged), "score = 1")
    assert said[0] == said[1].replace("status 0", "signal 9") or "without an answer" in said[0]
    assert said[1] == "compute_score ended its process (status 0) without an answer"
    assert said[2] == "compute_score returned '3', which is not what a function returns"
    assert said[3] == "compute_score returned the float nan as its score, expected a finite number"
    assert said[4] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        b"5",
        b"null",
        b"[" * 60_000,
        b'["value"]',
        b'["value", [{"score": 1}, null], 3]',
        b'["value", [' + b"9" * 5000 + b", null]]",
    ],
)
def test_an_answer_that_is_none_is_an_error_of_its_sample(scorer, text):
    say = (
        f"import os\nfor number in range(3, 64):\n    try: os.write(number, {text!r})\n    except "
        f"OSError: pass\nos._exit(0)"
    )
    said = score(scorer, say, "score = 1")
    assert said == ["compute_score ended its process (status 0) without an answer", 1.0]


def test_a_number_that_is_too_large_and_too_many_numbers_are_errors_of_their_samples(scorer):
    write = "    try: os.write(number, json.dumps({}).encode())\n    except OSError: pass"
    say = f"import json, os\nfor number in range(3, 64):\n{write}\nos._exit(0)"
    large = '["value", [{"score": 10**4000}, None]]'
    many = '["value", [{"score": 1, **{str(n): n for n in range(100)}}, None]]'
    said = score(scorer, say.format(large), say.format(many), "score = 1")
    assert said[0] == "compute_score returned the int of 13288 bits as its score, expected a finite number"
    assert said[1] == "compute_score returned 101 numbers, at most 64 can become metrics; return fewer"
    assert said[2] == 1.0


def test_a_kernel_without_landlock_is_said_before_anything_is_scored(monkeypatch):
    monkeypatch.setattr(process, "landlock_abi", lambda: 0)
    monkeypatch.setattr(process, "_die_with_parent", lambda: None)
    monkeypatch.setattr(process, "start_reaper", lambda *_, **__: None)
    monkeypatch.setattr(process, "_load_error", None)

    # The patch would affect later tests in this process.
    monkeypatch.setattr(process, "set_sample_limit", lambda seconds: None)
    monkeypatch.setattr(process.os, "setpgid", lambda *_: None)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setenv(process.OWNER, "")
    process.start([SANDBOXED], [], RewardSandboxConfig(), 1.0)
    assert process.load_error().startswith(
        "reward.functions' sandbox: this kernel has no Landlock (Linux 5.13)"
    )


def test_a_folder_of_temporary_files_that_nothing_is_executed_in_is_named_with_a_hint(monkeypatch):
    """os.access reports files on a noexec mount as not executable."""
    monkeypatch.setattr("megarl.machine.spawn.os.access", lambda path, mode: False)
    with pytest.raises(
        RewardFunctionError,
        match=r"sandbox: a launcher in /\S+ cannot be executed .*: set TMPDIR to a folder that is not",
    ):
        RewardScorer([SANDBOXED], 1.0, 0.0, 1)


def test_functions_beside_it_work_as_ever(tmp_path):
    """One function has a sandbox and one does not; the one without sees no other environment variables
    either."""
    plain = tmp_path / "plain.py"
    plain.write_text(
        "import os\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
        "os.environ.get('X', 5)\n"
    )
    functions = [SANDBOXED, RewardFunctionConfig(path=str(plain), weight=2.0)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("X", "9")
        with RewardScorer(functions, 5.0, 0.0, 1) as scorer:
            report = scorer.score([ScoreRequest("u", "s", "score = 1", None, {})])

    assert (column(report, "score"), column(report, "parts"), column(report, "answer")) == (
        [11.0],
        [(1.0, 5.0)],
        ["1"],
    )


def test_a_missing_file_is_named_as_ever(tmp_path):
    with pytest.raises(RewardFunctionError, match="absent.py': there is no such file"):
        RewardScorer([RewardFunctionConfig(path=str(tmp_path / "absent.py"), sandbox=True)], 1.0, 0.0, 1)
