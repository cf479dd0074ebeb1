"""Who wrote something on the volume, so that a later life can tell whether that process has surely ended.

A process of the same host, kernel and PID namespace is looked up by its id and start
time, which together are never given twice. If its namespace is gone and another one has
its number, all its processes are gone as well. A process of an earlier instance of this
very container, in the same pod, has ended too: kubelet starts the next instance only
then. It mounts a file of its own into each instance, and the mount's name tells pod,
container and instance apart.

Everywhere else nothing can be known from here, and nobody is taken for dead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from migrator.platform.container import pod_name

_INSTANCE = re.compile(r"(\S*/pods/[^/\s]+/containers/[^/\s]+)/([^/\s]+)")
"""Where kubelet keeps what a container says at its end: pod, container, instance."""


def mine(*, proc: Path = Path("/proc")) -> dict[str, Any]:
    """What tells this process from all others, as JSON can hold it."""
    found = {"host": pod_name(), "pid": os.getpid(), "started": _started(proc, os.getpid()), **_kernel(proc)}
    return {**found, **_instance(proc)}


def has_ended(other: Mapping[str, Any], *, proc: Path = Path("/proc")) -> bool:
    """Whether the process that said this of itself has surely ended."""
    here = {"host": pod_name(), **_kernel(proc), **_instance(proc)}

    def is_same(*keys: str) -> bool:
        return all(here.get(key) and here.get(key) == other.get(key) for key in keys)

    if is_same("host", "boot", "namespace"):
        pid, started = other.get("pid"), other.get("started")
        return isinstance(pid, int) and bool(started) and not _is_there(proc, pid, str(started))
    return is_same("container") and bool(other.get("instance")) and here.get("instance") != other["instance"]


def _is_there(proc: Path, pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    # Empty: the process is there, and only its file cannot be read.
    return _started(proc, pid) in (started, "")


def _started(proc: Path, pid: int) -> str:
    """In ticks since the kernel's start; empty if that cannot be read."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return "it ended" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def _kernel(proc: Path) -> dict[str, str]:
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": str((proc / "self/ns/pid").readlink())}
    except OSError:
        return {}


def _instance(proc: Path) -> dict[str, str]:
    try:
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return {}
    for line in mounts:
        found = _INSTANCE.fullmatch(line.split()[3]) if len(line.split()) > 3 else None
        if found:
            return {"container": found[1], "instance": found[2]}
    return {}
