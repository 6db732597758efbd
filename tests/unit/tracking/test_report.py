"""Test the report page without a browser: its size, its parts, damaged files, and access to the live
server."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest

import megarl
from benchmarks.report import LARGEST_MB, make_run
from megarl import rewards, roles
from megarl.cli.inspect.report import LiveReport
from megarl.cli.main import main
from megarl.controller.worker import Worker, registered_methods
from megarl.rollout import worker as rollout_workers
from megarl.tracking.report.run_folder import PHASE_NAMES, RunFolder, open_runs, timeline_part
from megarl.tracking.report.sample_part import sample_part
from megarl.tracking.samples import read_samples, sample_path
from megarl.tracking.timeline import Span, Timeline

STEPS = 20
SAMPLES = 64
TOKENS = 6
FILES = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_run(folder := tmp_path_factory.mktemp("runs") / "made", STEPS, SAMPLES, TOKENS, FILES)
    return folder


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def opened(path: Path) -> RunFolder:
    (run,) = open_runs([path])
    return run


def problems(path: Path) -> list[str]:
    """Return the problems of all parts."""
    run = opened(path)
    found = []

    for name in run.versions():
        content = run.part(name)
        size = int.from_bytes(content[:4], "little")
        part = json.loads(content[4 : 4 + size] if name.startswith("samples/") else content)
        found += [*part.get("problems", []), *([part["problem"]] if "problem" in part else [])]

    return found


def test_a_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 500, 5000, 128)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size < LARGEST_MB * 1e6


def test_a_report_of_several_runs_is_written_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / name, 2, 2, 4)
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out.startswith("report written to report.html (")
    assert sorted(path.name for path in tmp_path.rglob("report.html")) == ["report.html"]


@pytest.mark.parametrize(
    ("max_tokens", "num_shown"),
    [(1, 1), (3 * TOKENS + 1, 3), (8 * TOKENS + 1, 8), (15 * TOKENS + 2, 8), (16 * TOKENS + 2, 16)],
)
def test_of_more_samples_than_a_page_takes_the_first_prompts_are_whole(
    run_dir: Path, max_tokens: int, num_shown: int
) -> None:
    """A file has two prompts of one token with eight samples each."""
    content = sample_part(sample_path(run_dir, STEPS), STEPS, max_tokens)
    header = json.loads(content[4 : 4 + int.from_bytes(content[:4], "little")])
    assert (len(header["uid"]), header["of"]) == (num_shown, SAMPLES // FILES)


def test_tokens_and_numbers_are_those_of_the_file(run_dir: Path) -> None:
    rows = read_samples(sample_path(run_dir, STEPS)).rows
    content = opened(run_dir).part(f"samples/{STEPS}")
    end = 4 + int.from_bytes(content[:4], "little")
    header = json.loads(content[4:end])
    total = SAMPLES // FILES * TOKENS
    places = np.frombuffer(content, "<u2", total, end)
    halves = np.frombuffer(content, "<f2", 5 * total, end + 2 * total).reshape(5, total)
    own, gaps, advantages, weights, shares = halves
    excluded = np.frombuffer(content, "u1", total, end + 12 * total)
    texts = [header["tokens"][place] for place in places]
    assert "".join(texts) == "".join(header["response"]) == "".join(rows["response"].to_pylist())
    expected = {
        name: np.concatenate(rows[name].to_pylist())
        for name in (
            *("response_ids", "log_probs", "rollout_log_probs", "advantages"),
            *("rollout_weights", "excluded", "loss_share"),
        )
    }
    assert [header["ids"][place] for place in places] == expected["response_ids"].tolist()
    np.testing.assert_allclose(own, expected["log_probs"], rtol=1e-3)
    np.testing.assert_allclose(
        gaps, expected["log_probs"] - expected["rollout_log_probs"], rtol=2e-3, atol=1e-6
    )
    np.testing.assert_allclose(advantages, expected["advantages"], rtol=1e-3)
    largest = np.abs(expected["log_probs"] - expected["rollout_log_probs"]).reshape(-1, TOKENS).max(1)
    np.testing.assert_allclose(header["max_gap"], largest, rtol=1e-3)
    np.testing.assert_allclose(weights, expected["rollout_weights"], rtol=1e-3)
    np.testing.assert_allclose(shares, expected["loss_share"] * total, rtol=1e-3)
    assert excluded.tolist() == expected["excluded"].tolist()
    assert excluded.any()
    assert header["all_tokens"] == total
    assert sum(header["share"]) == pytest.approx(1, rel=1e-3)


def test_samples_of_a_former_version_have_no_weights(run_dir: Path) -> None:
    path = sample_path(run_dir, STEPS)
    pq.write_table(pq.read_table(path).drop_columns(["rollout_weights", "excluded", "loss_share"]), path)
    content = opened(run_dir).part(f"samples/{STEPS}")
    end = 4 + int.from_bytes(content[:4], "little")
    total = SAMPLES // FILES * TOKENS
    weights, shares = np.frombuffer(content, "<f2", 5 * total, end + 2 * total).reshape(5, total)[3:]
    assert np.isnan(weights).all()
    assert np.isnan(shares).all()
    assert not any(content[end + 12 * total :])
    assert set(json.loads(content[4:end])["share"]) == {None}


def test_a_whole_run_has_no_problem_and_what_is_absent_is_left_out(run_dir: Path) -> None:
    assert problems(run_dir) == []
    for name in ("timeline.json", "generations.jsonl", "summary.json", "config.yaml"):
        (run_dir / name).unlink()
    shutil.rmtree(run_dir / "samples")
    assert list(opened(run_dir).versions()) == ["about", "metrics"]
    assert problems(run_dir) == []
    assert main(["report", str(run_dir)]) == 0


def test_every_phase_and_call_of_megarl_has_a_readable_name() -> None:
    """Phases are read from the source, calls from the workers."""
    source = "\n".join(path.read_text() for path in Path(megarl.__file__).parent.rglob("*.py"))
    phases = set(re.findall(r"""with [^\n]*\bphase\("(\w+)"\)""", source))
    modules = [
        import_module(f"{package.__name__}.{module.name}")
        for package in (roles, rollout_workers, rewards)
        for module in iter_modules(package.__path__)
    ]
    classes = [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Worker)
    ]
    calls = {"__init__"}.union(*map(registered_methods, classes))
    assert {"step", "gen", "save_checkpoint"} <= phases
    assert {"submit_and_poll", "finish", "update_scored", "resident_memory_gb", "exchange"} <= calls
    assert set(PHASE_NAMES) == (phases | calls) - {"forward"}  # an example in a docstring
    assert [name for name in PHASE_NAMES.values() if "_" in name] == []


def test_calls_of_one_name_share_it(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    names = ("update", "my_own_phase", "update_scored")
    timeline.add([Span("a", "actor", 0, name, 1.0 * at, 1.0 * at + 0.5) for at, name in enumerate(names)], 1)
    timeline.write()
    part = timeline_part(tmp_path / "timeline.json")
    assert (part["names"], part["name"]) == (["my_own_phase", "train"], [1, 0, 1])
    written = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]

    # the file contains the methods
    assert [event["name"] for event in written if event["ph"] == "X"] == list(names)


def test_keys_that_one_kind_alone_can_have_are_named(run_dir: Path) -> None:
    def foreign(values: str) -> list[str]:
        (run_dir / "config.yaml").write_text(values)
        about = json.loads(opened(run_dir).part("about"))
        return [about["kind"], *about["foreign"]]

    ppo = (
        "kind: ppo\nalgorithm: {gamma: 1}\nactor: {optim: {lr: 1}}\ntracking: {loggers: [console]}\ndata: "
        "{train_weights: [1]}\n"
    )
    assert foreign(ppo) == ["ppo", "algorithm.gamma"]
    sft = "kind: sft\nactor: {optim: {lr: 1}}\ndata: {columns: {messages: m}, train_files: []}\n"
    assert foreign(sft) == ["sft", "data.columns.messages"]


DAMAGE = {
    "metrics.jsonl": [b"no json\n", b"\xff\xfe\n", b"[1]\n", b""],
    "timeline.json": [b"", b"[]", b'{"traceEvents": [{"name": "x"}]}', b"[" * 100_000],
    "generations.jsonl": [b"no json\n", b"[]\n", b'{"step": 1}\n'],
    "summary.json": [b"{", b"\xff"],
    "config.yaml": [b"a: [", b"- 1\n", b"\xff", b"a: !!int ''\n", b"a: &a {b: *a}\n", b"[" * 2_000],
    "samples/step_00000020.parquet": [b"", b"no parquet"],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, all_of in DAMAGE.items() for content in all_of]
)
def test_a_damaged_file_is_one_line(name: str, content: bytes, run_dir: Path) -> None:
    (run_dir / name).write_bytes(content)
    (problem,) = problems(run_dir)
    assert problem.startswith(f"{run_dir / name}")
    assert len(problem.splitlines()) == 1


def test_a_run_of_damaged_files_has_a_page(run_dir: Path) -> None:
    for name, contents in DAMAGE.items():
        (run_dir / name).write_bytes(contents[0])
    assert len(problems(run_dir)) == len(DAMAGE)
    assert main(["report", str(run_dir)]) == 0


def test_what_a_killed_run_left_is_shown(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 21, "critic/sc')
    assert problems(run_dir) == []
    assert json.loads(opened(run_dir).part("metrics"))["steps"][-1] == STEPS


def test_runs_are_named_by_what_tells_them_apart(made: Path, tmp_path: Path) -> None:
    paths = [shutil.copytree(made, tmp_path / name) for name in ("a/ppo", "b/ppo", "b/grpo")]
    assert [run.name for run in open_runs(paths)] == ["a/ppo", "b/ppo", "grpo"]


def test_what_is_no_run_is_refused_in_a_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        (
            str(tmp_path / "absent"),
        ): f"{tmp_path / 'absent'}: there is no such folder; give a run's trainer.output_dir",
        (
            str(tmp_path / "empty"),
        ): f"{tmp_path / 'empty'}: no run has written here (no config.yaml, no metrics.jsonl); give",
        (str(made), str(made)): f"{made}: is listed twice",
        (
            str(made),
            "--output",
            str(tmp_path / "absent" / "page.html"),
        ): "cannot be written (No such file or directory); give another file",
        (str(made), "--live", "--port", "99999"): "--port 99999: cannot listen",
    }

    for arguments, message in cases.items():
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_a_page_is_served_until_ctrl_c(run_dir: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    pages = []

    def look() -> None:
        while not (url := re.search(r"http://\S+/", told.read_text())):
            time.sleep(0.01)
        with urllib.request.urlopen(url[0]) as answer:
            pages.append(answer.read())
        os.kill(os.getpid(), signal.SIGINT)

    with told.open("w", buffering=1) as file, contextlib.redirect_stdout(file):
        reader = threading.Thread(target=look)
        reader.start()
        assert main(["report", str(run_dir), "--live"]) == 0

    reader.join()
    assert b'"live": true' in pages[0]
    assert told.read_text().endswith("\nstopped\n")


@pytest.fixture
def live(run_dir: Path) -> Iterator[LiveReport]:
    report = LiveReport([opened(run_dir)])
    thread = threading.Thread(target=report.serve_forever)
    thread.start()
    yield report
    report.shutdown()
    report.server_close()
    thread.join()


def ask(report: LiveReport, path: str, host: str | None = None) -> tuple[int, bytes]:
    address = urlsplit(report.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()

    return answer.status, content


def test_the_live_server_gives_nothing_without_the_key(live: LiveReport) -> None:
    address = urlsplit(live.url)
    assert address.hostname == "127.0.0.1"
    assert ask(live, address.path)[0] == HTTPStatus.OK

    for path in (
        "/",
        "/manifest",
        "/part/0/about",
        f"{address.path[:-2]}/",
    ):
        status, content = ask(live, path)
        assert (status, len(content.splitlines())) == (HTTPStatus.FORBIDDEN, 1), path

    assert ask(live, address.path, host=f"elsewhere.example:{address.port}")[0] == HTTPStatus.FORBIDDEN


def test_the_live_server_gives_parts_and_nothing_else(live: LiveReport, run_dir: Path) -> None:
    path = urlsplit(live.url).path
    about = json.loads(gzip.decompress(ask(live, f"{path}part/0/about")[1]))
    assert about["summary"]["steps"] == STEPS

    for name in (
        "part/0/samples/3",
        "part/1/about",
        "part/-1/about",
        "part/0/../about",
        "part/0/config.yaml",
        "part/0/samples/../../x",
        "x",
    ):
        assert ask(live, path + name)[0] == HTTPStatus.NOT_FOUND, name

    before = json.loads(ask(live, f"{path}manifest")[1])
    with (run_dir / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": STEPS + 1, "actor/entropy": 0.5}) + "\n")
    after = json.loads(ask(live, f"{path}manifest")[1])
    changed = {
        name
        for name, version in after["runs"][0]["parts"].items()
        if before["runs"][0]["parts"][name] != version
    }
    assert changed == {"metrics"}
    assert json.loads(gzip.decompress(ask(live, f"{path}part/0/metrics")[1]))["steps"][-1] == STEPS + 1
