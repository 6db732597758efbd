"""Settings of a machine or a container that forbid the namespaces of a sandbox, and how to change them.

Sources: user_namespaces(7), seccomp(2), mount_too_revealing() in fs/namespace.c of Linux, AppArmor's
restriction of unprivileged user namespaces in Ubuntu 23.10 and newer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Settings with the value that forbids user namespaces, and the command that changes it.
_SETTINGS = (
    ("sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    # Debian and older Ubuntu
    ("sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
)
# Ubuntu 23.10 and newer: a user namespace of a program without a profile has no privileges.
_APPARMOR_RESTRICTION = "sys/kernel/apparmor_restrict_unprivileged_userns"


def namespace_obstacles(proc: Path = Path("/proc"), is_root: bool | None = None) -> list[str]:
    """Return what may forbid namespaces here, each with its fix; empty if nothing is known to.

    Args:
        proc: The process file system.
        is_root: Whether this process has the user ID 0. None: look.
    """
    return list(_obstacles(proc, os.geteuid() == 0 if is_root is None else is_root))


def _obstacles(proc: Path, is_root: bool) -> Iterator[str]:
    for setting, forbids, fix in _SETTINGS:
        if _read(proc / setting) == forbids:
            yield f"/proc/{setting} is {forbids} ({fix})"
    if not is_root and _read(proc / _APPARMOR_RESTRICTION) == "1":
        yield (
            f"/proc/{_APPARMOR_RESTRICTION} is 1, as on Ubuntu 24.04 (sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0, or a profile of AppArmor with `userns,` for "
            "bwrap)"
        )

    # These are set by the engine of a container. A program cannot change them from inside.
    if "Seccomp:\t2" in _read(proc / "self/status"):
        yield (
            "a seccomp filter of the container (docker and podman: --security-opt seccomp=unconfined; "
            "Kubernetes: seccompProfile.type: Unconfined)"
        )
    # On machines with SELinux, self/attr/current is a label of SELinux.
    profile = _read(proc / "self/attr/apparmor/current")
    if profile and not profile.startswith("unconfined"):
        yield (
            f"the AppArmor profile {profile} (docker: --security-opt apparmor=unconfined; Kubernetes: "
            "appArmorProfile.type: Unconfined)"
        )
    if covered := _covered(_read(proc / "self/mountinfo")):
        yield (
            f"{covered} is covered by another mount, so no further /proc can be mounted (docker: "
            "--security-opt systempaths=unconfined; podman: --security-opt unmask=ALL; Kubernetes: "
            "procMount: Unmasked)"
        )


def _covered(mounts: str) -> str:
    """Return a path in /proc that something is mounted on, such as by a container engine; empty if none is.

    The kernel then mounts no new /proc in a user namespace, because it would show what is covered.
    """
    places = (line.split()[4] for line in mounts.splitlines())
    # Programs mount binfmt_misc on an empty folder, which covers nothing.
    return next((place for place in places if place.startswith("/proc/") and "binfmt_misc" not in place), "")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the kernel does not have it
        return ""
