"""The identity of a process, written to the volume: a later life can check whether that process has certainly ended.

A process of the same host, kernel and PID namespace is looked up by its pid and start
time; together they are never reused. If its PID namespace has ended and another one
has the same number, no process with this pid and start time exists. A process of an
earlier instance of the same container in the same pod has ended, too: kubelet starts
the next instance only after that. Kubelet mounts a file of its own into each instance,
and the path of this mount contains pod, container and instance.

In all other cases nothing is known, and the process counts as alive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from migrator.platform.container import pod_name

_INSTANCE = re.compile(r"(\S*/pods/[^/\s]+/containers/[^/\s]+)/([^/\s]+)")
"""The path at which kubelet keeps the termination message: pod, container, instance."""


def mine(*, proc: Path = Path("/proc")) -> dict[str, Any]:
    """The identity of this process, as JSON."""
    found = {"host": pod_name(), "pid": os.getpid(), "started": _started(proc, os.getpid()), **_kernel(proc)}
    return {**found, **_instance(proc)}


def has_ended(other: Mapping[str, Any], *, proc: Path = Path("/proc")) -> bool:
    """Whether the process with this identity has certainly ended."""
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
    # Empty: the process exists, but its file cannot be read.
    return _started(proc, pid) in (started, "")


def _started(proc: Path, pid: int) -> str:
    """The start time of a process, in ticks since the boot; empty if it cannot be read."""
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
