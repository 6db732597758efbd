"""Atomic replacement of files and folders: whenever the writer is killed, readers find the old version or the
new one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megarl.machine.files import parse_yaml, whole_folder, write_whole

# A program that kills itself with SIGKILL before, between, or after the renames; the argument is the number
# of renames before. It can also stay in the block.
_WRITER = """
import os, signal, sys, time
from pathlib import Path
from megarl.machine.files import whole_folder

folder, moment = Path(sys.argv[1]), sys.argv[2]
renamed = 0
rename = os.rename

def counted(source, target):
    global renamed
    if str(renamed) == moment:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
    renamed += 1

os.rename = counted
with whole_folder(folder) as partial:
    (partial / "content").write_text("new")
    if moment == "writing":
        os.kill(os.getpid(), signal.SIGKILL)
    if moment == "stay":
        print("here", flush=True)
        time.sleep(60)
if str(renamed) == moment:
    os.kill(os.getpid(), signal.SIGKILL)
"""

# A program that kills itself with SIGKILL when the new content is on disk but not yet renamed.
_FILE_WRITER = """
import os, signal, sys
from pathlib import Path
from megarl.machine.files import write_whole

os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
write_whole(Path(sys.argv[1]), "new")
"""


def start(folder: Path, moment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), moment], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "export"
    path.mkdir()
    (path / "content").write_text("old")
    return path


def write(folder: Path, content: str) -> None:
    with whole_folder(folder) as partial:
        (partial / "content").write_text(content)


def write_in_vain(folder: Path) -> None:
    with suppress(ZeroDivisionError), whole_folder(folder) as partial:
        (partial / "content").write_text("in vain")
        raise ZeroDivisionError


def test_a_file_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    write_whole(path, "ältere")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["summary"]


def test_a_file_whose_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    path.write_text("old")
    assert (
        subprocess.run([sys.executable, "-c", _FILE_WRITER, str(path)], check=False).returncode
        == -signal.SIGKILL
    )
    assert path.read_text() == "old"
    write_whole(path, "newer")  # the file left by the killed writer does not matter
    assert path.read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["summary"]


def test_a_file_on_a_full_disk(tmp_path: Path) -> None:
    """/dev/full produces the kernel's own error for any writer."""
    path = tmp_path / "summary"
    path.write_text("old")
    (tmp_path / ".summary.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["summary"]


def test_a_folder_is_replaced_and_nothing_is_left(folder: Path) -> None:
    (folder / "of the old one").touch()
    write(folder, "new")
    assert [path.name for path in folder.iterdir()] == ["content"]
    assert (folder / "content").read_text() == "new"
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def test_an_error_leaves_the_old_one(folder: Path) -> None:
    write_in_vain(folder)
    assert (folder / "content").read_text() == "old"
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


@pytest.mark.parametrize(
    ("moment", "found", "recovered"),
    [
        ("writing", "old", "old"),
        ("0", "old", "old"),  # everything is written, nothing renamed
        ("1", None, "new"),  # the old folder is moved away; recovery renames the new one
        ("2", "new", "new"),
    ],
)
def test_a_kill_leaves_the_old_folder_or_the_new_one(
    folder: Path, moment: str, found: str | None, recovered: str
) -> None:
    assert start(folder, moment).wait(60) == -signal.SIGKILL
    assert ((folder / "content").read_text() if folder.exists() else None) == found

    write_in_vain(folder)  # this recovers the files left by the killed writer first
    assert (folder / "content").read_text() == recovered
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def test_an_old_one_without_its_successor_comes_back(folder: Path) -> None:
    """This happens if a clean-up was itself killed, or if its files were removed."""
    assert start(folder, "1").wait(60) == -signal.SIGKILL
    (scratch,) = folder.parent.glob(".export.partial-*")
    shutil.rmtree(scratch / "new")
    write_in_vain(folder)
    assert (folder / "content").read_text() == "old"


def test_two_writers(folder: Path) -> None:
    """The second writer is refused while the first lives.

    Files left by a killed writer do not block the next one.
    """
    writer = start(folder, "stay")
    assert writer.stdout is not None
    assert writer.stdout.readline() == "here\n"
    with pytest.raises(FileExistsError, match="another process is writing this folder"):
        write(folder, "second")
    assert (folder / "content").read_text() == "old"
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.wait(60) == -signal.SIGKILL
    write(folder, "third")
    assert (folder / "content").read_text() == "third"
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[" * 2_000, "nested too deep"),
        ("{a: " * 2_000, "nested too deep"),
        ("&a [*a]", "nested too deep"),
        ("&a {b: {c: *a}}", "nested too deep"),
        ("&a [&b [*a, *b], *b]", "nested too deep"),
        ("!!bool x", "a value does not fit its tag (KeyError: 'x')"),
        ("!!int ''", "a value does not fit its tag (IndexError: "),
        ("!!timestamp x", "a value does not fit its tag (AttributeError: "),
        ("!!int x", "'x'"),
        ("!!float x", "'x'"),
        ("2001-99-99", "month must be in 1..12"),
        ("1" * 5000, "4300 digits"),
        ("[1", "while parsing a flow sequence"),
        ("!!python/name:os.system", "could not determine a constructor"),
    ],
)
def test_damaged_yaml_is_a_value_error_of_one_line(value: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        parse_yaml(f"seed: {value}\n")
    assert "\n" not in str(caught.value)


def test_yaml_with_aliases_is_read() -> None:
    """Each level holds the one before it nine times, so it cannot be walked value by value."""
    text = "a: &a0 {b: 1}\n" + "".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 60)
    )
    values = parse_yaml(text)
    assert values["a1"] == [{"b": 1}] * 9
    assert values["a59"][0] is values["a58"]
