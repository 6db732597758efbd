"""What may forbid namespaces, by files of /proc as containers and distributions show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.machine.sandbox_levels import namespace_obstacles

# Lines of a container of Docker, and of a machine.
MOUNTS = """\
601 600 0:49 / /proc rw,nosuid - proc proc rw
602 601 0:49 /sys /proc/sys ro,nosuid - proc proc rw
"""
MACHINE = """\
26 30 0:24 / /proc rw,nosuid - proc proc rw
31 26 0:29 / /proc/sys/fs/binfmt_misc rw,relatime - autofs systemd-1 rw
"""


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("sys/user/max_user_namespaces", "0\n", "sysctl -w user.max_user_namespaces="),
        ("sys/kernel/unprivileged_userns_clone", "0\n", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("sys/kernel/apparmor_restrict_unprivileged_userns", "1\n", "as on Ubuntu 24.04"),
        ("self/status", "Name:\tpython\nSeccomp:\t2\n", "--security-opt seccomp=unconfined"),
        ("self/attr/apparmor/current", "docker-default (enforce)\n", "profile docker-default (enforce)"),
        ("self/mountinfo", MOUNTS, "/proc/sys is covered"),
    ],
)
def test_each_obstacle_has_its_fix(file: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    (line,) = namespace_obstacles(tmp_path, is_root=False)
    assert expected in line


def test_a_machine_that_allows_namespaces_has_none(tmp_path: Path) -> None:
    assert namespace_obstacles(tmp_path, is_root=False) == []
    for file, text in {
        "sys/user/max_user_namespaces": "96365\n",
        "sys/kernel/unprivileged_userns_clone": "1\n",
        "sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",  # does not concern root
        "self/status": "Name:\tpython\nSeccomp:\t0\n",
        "self/attr/apparmor/current": "unconfined\n",
        "self/attr/current": "system_u:system_r:container_t:s0:c1,c2\n",
        "self/mountinfo": MACHINE,
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert namespace_obstacles(tmp_path, is_root=True) == []
