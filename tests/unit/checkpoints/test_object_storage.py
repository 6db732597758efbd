"""Test copies of checkpoints: on a server with S3's API, and on a file system that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from moto.server import ThreadedMotoServer

from megarl.checkpoints.object_storage import ObjectStorage, local_copy
from megarl.checkpoints.run_folder import CheckpointFolder, check_files
from megarl.machine.errors import CheckpointError
from tests.unit.checkpoints.test_run_folder import add


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server on loopback, with a bucket. Returns its endpoint."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    variables = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in {**variables, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    fs = fsspec.filesystem("s3")
    fs.mkdir("runs")
    yield "s3://runs/first"
    fs.rm("runs", recursive=True)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    made = CheckpointFolder(tmp_path / "checkpoints")
    made.prepare()
    return made


def contents(checkpoint: Path) -> dict[str, bytes]:
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}


def test_a_checkpoint_returns_from_s3_as_it_was(
    bucket: str, folder: CheckpointFolder, tmp_path: Path
) -> None:
    storage = ObjectStorage(bucket)
    storage.check_writable()
    assert storage.latest() is None
    first, second = add(folder, 5), add(folder, 10)
    nbytes = storage.upload(first)
    assert nbytes == sum(len(content) for content in contents(first).values())
    assert storage.latest() == "step_00000005"
    storage.upload(second)
    assert storage.latest() == "step_00000010"

    elsewhere = CheckpointFolder(tmp_path / "elsewhere")
    found = local_copy(bucket, elsewhere)
    assert found == elsewhere.path / "step_00000010" == elsewhere.latest()
    assert contents(found) == contents(second)
    assert check_files(found)["step"] == 10
    older = local_copy(f"{bucket}/step_00000005/", elsewhere)
    assert contents(older) == contents(first)


def test_checkpoints_of_two_runs_are_not_confused(tmp_path: Path) -> None:
    """Both have the same step, and are downloaded to the same folder."""
    elsewhere = CheckpointFolder(tmp_path / "elsewhere")
    for name in ("first", "second"):
        folder = CheckpointFolder(tmp_path / name)
        folder.prepare()
        checkpoint = add(folder, 5, f"state of {name}")
        url = f"file://{tmp_path}/storage-{name}"
        ObjectStorage(url).upload(checkpoint)
        assert contents(local_copy(url, elsewhere)) == contents(checkpoint)


def test_a_copy_without_its_manifest_is_not_a_checkpoint(
    bucket: str, folder: CheckpointFolder, tmp_path: Path
) -> None:
    storage = ObjectStorage(bucket)
    storage.upload(add(folder, 5))
    fsspec.filesystem("s3").rm("runs/first/step_00000005/upload.json")
    elsewhere = CheckpointFolder(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"runs/first/step_00000005: is not a complete checkpoint"):
        local_copy(bucket, elsewhere)
    assert elsewhere.latest() is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [(b"{]", r"huggingface/config.json: is not what was written"), (b"{}{", r"has 3 bytes, not 2")],
)
def test_a_damaged_object_is_refused(
    damage: bytes, message: str, bucket: str, folder: CheckpointFolder, tmp_path: Path
) -> None:
    ObjectStorage(bucket).upload(add(folder, 5))
    fsspec.filesystem("s3").pipe("runs/first/step_00000005/huggingface/config.json", damage)
    elsewhere = CheckpointFolder(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=message):
        local_copy(bucket, elsewhere)
    assert [path.name for path in elsewhere.path.iterdir()] == []


@pytest.mark.parametrize("name", ["/etc/cron.d/job", "../../job", "actor/../../job"])
def test_no_file_is_written_outside_the_checkpoint(
    name: str, folder: CheckpointFolder, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/storage"
    ObjectStorage(url).upload(add(folder, 5))
    manifest = tmp_path / "storage" / "step_00000005" / "upload.json"
    files = json.loads(manifest.read_text())
    files["files"][name] = {"nbytes": 1, "checksum": "0"}
    manifest.write_text(json.dumps(files))
    with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
        local_copy(url, CheckpointFolder(tmp_path / "elsewhere"))


def test_a_copy_of_the_same_step_is_replaced(folder: CheckpointFolder, tmp_path: Path) -> None:
    """A run that resumed from an earlier checkpoint reaches the step again."""
    url = f"file://{tmp_path}/storage"
    ObjectStorage(url).upload(add(folder, 5, "before"))
    again = add(folder, 5, "after")
    ObjectStorage(url).upload(again)
    assert contents(local_copy(url, CheckpointFolder(tmp_path / "elsewhere"))) == contents(again)


class Flaky(LocalFileSystem):
    """A file system that fails as often as it is told to."""

    protocol = "flaky"
    failures = 0

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        if Flaky.failures > 0:
            Flaky.failures -= 1
            raise ConnectionResetError("connection reset by peer")
        return super().put_file(*args, **kwargs)


@pytest.fixture
def flaky(tmp_path: Path) -> str:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    return f"flaky://{tmp_path}/storage"


def test_a_file_that_fails_is_tried_again(flaky: str, folder: CheckpointFolder, tmp_path: Path) -> None:
    waits: list[float] = []
    Flaky.failures = 3
    checkpoint = add(folder, 5)
    storage = ObjectStorage(flaky, pause=waits.append)
    storage.upload(checkpoint)
    assert len(waits) == 3
    assert contents(
        local_copy(f"file://{tmp_path}/storage", CheckpointFolder(tmp_path / "elsewhere"))
    ) == contents(checkpoint)


def test_a_file_that_always_fails_leaves_no_checkpoint(flaky: str, folder: CheckpointFolder) -> None:
    Flaky.failures = 10**6
    storage = ObjectStorage(flaky, pause=lambda seconds: None)
    with pytest.raises(
        CheckpointError, match=r"cannot be written \(ConnectionResetError: connection reset by peer\)"
    ):
        storage.upload(add(folder, 5))
    Flaky.failures = 0
    assert storage.latest() is None


def test_a_run_that_has_ended_copies_nothing_more(flaky: str, folder: CheckpointFolder) -> None:
    storage = ObjectStorage(flaky)
    storage.close()
    with pytest.raises(CheckpointError, match="the run has ended before step_00000005 was copied"):
        storage.upload(add(folder, 5))


def test_a_bucket_that_does_not_exist_is_named_before_a_run(bucket: str) -> None:
    storage = ObjectStorage("s3://no-such-bucket/run")
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/run: cannot be (written|read)") as caught:
        storage.check_writable()
    assert any("AWS_ENDPOINT_URL" in line for line in caught.value.hint)
