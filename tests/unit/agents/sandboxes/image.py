"""A small image, from programs of this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("bash", "cat", "sleep", "timeout")


def write_image(folder: Path) -> None:
    """Write the file system of an image with PROGRAMS, their libraries, and a file /etc/shop."""
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        files = {"/bin/" + name: program}
        files |= {word: word for word in libraries.split() if word.startswith("/")}
        for target, source in files.items():
            (folder / target[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / target[1:])
    (folder / "etc").mkdir()
    (folder / "etc" / "shop").write_text("open")
    (folder / "tmp").mkdir(mode=0o1777)
